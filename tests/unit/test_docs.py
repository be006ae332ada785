"""README and docs: links lead somewhere, and commands are those of the command line."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from vllm_relay.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: Any = typer.main.get_command(app)


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative link targets of a page in this folder that are no files."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [x.partition("#")[0] for x in targets if "://" not in x]
    return [x for x in local if x and not (folder / x).exists()]


def commands(text: str) -> list[list[str]]:
    """Arguments of the lines `vllm-relay …`, indented, or with a prompt in a fence."""
    lines = re.findall(r"^(?: {4}|\$ )vllm-relay (.+)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def unknown(arguments: list[str]) -> list[str]:
    """Words of a command line that the command does not have; vLLM's own options do not count."""
    name, *rest = arguments
    command = COMMANDS if name.startswith("-") else COMMANDS.commands.get(name)
    if command is None:
        return [name]
    known = {option for parameter in command.params for option in parameter.opts}
    given = arguments if command is COMMANDS else rest
    return [word for word in given if word.startswith("-") and word.split("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    assert broken_links(page.read_text(), page.parent) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one_of_ours(page: Path) -> None:
    wrong = [found for line in commands(page.read_text()) if (found := unknown(line))]
    assert wrong == []


def test_wrong_links_and_commands_are_found() -> None:
    assert broken_links("[a](nowhere.md#b) [c](https://x/y.md) [d](#e)", ROOT) == ["nowhere.md"]
    text = "    vllm-relay bild -o x\n    vllm-relay explain x --concurency 4  # why\n"
    assert [unknown(line) for line in commands(text)] == [["bild"], ["--concurency"]]


def test_every_page_is_in_the_site() -> None:
    index = (ROOT / "docs/index.md").read_text().splitlines()
    missing = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index", *index}
    assert missing == set()
