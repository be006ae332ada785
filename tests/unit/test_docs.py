"""README and docs: links lead somewhere, commands and Python blocks run."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import vllm_relay
from tests.unit.system_kv.files import write_small
from vllm_relay.cli import app
from vllm_relay.config import RelayConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: Any = typer.main.get_command(app)
# Commands that start an engine or a server, or change the shell: the test that has them.
ELSEWHERE = {
    "bench": "tests/engine/test_cli_bench.py",
    "build": "tests/engine/test_system_kv.py",
    "calibrate": "tests/unit/test_cli_calibrate.py",
    "doctor": "tests/engine/test_doctor.py",
    "list": "tests/engine/test_pins.py",
    "pin": "tests/engine/test_pins.py",
    "save": "tests/engine/test_pins.py",
    "top": "tests/unit/test_cli_top.py",
    "unpin": "tests/engine/test_pins.py",
    "verify --model": "tests/engine/test_system_kv.py",
    "verify --recompute": "tests/engine/test_system_kv.py",
    "--install-completion": "tests/unit/test_cli.py",
}


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative link targets of a page in this folder that are no files."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [x.partition("#")[0] for x in targets if "://" not in x]
    return [x for x in local if x and not (folder / x).exists()]


def commands(text: str, program: str = "vllm-relay") -> list[list[str]]:
    """Arguments of a program: indented, with a prompt in a fence, or in a sentence."""
    text = text.replace("\\\n", "")
    lines = re.findall(rf"^(?: {{4}}|\$ )(?:\w+=\S+ )*{program} (.+)$", text, re.MULTILINE)
    lines += re.findall(rf"`(?:\w+=\S+ )*{program} ([^`]+)`", text)
    return [shlex.split(line, comments=True) for line in lines]


def elsewhere(arguments: list[str]) -> str | None:
    """The test of `ELSEWHERE` that runs a command line."""
    keys = (key for key in ELSEWHERE if set(key.split()) <= set(arguments))
    return next((ELSEWHERE[key] for key in keys), None)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.+?)^```", (ROOT / page).read_text(), re.M | re.S)


def unknown(arguments: list[str]) -> list[str]:
    """Words of a command line that the command does not have; vLLM's own options do not count."""
    name, *rest = arguments
    command = COMMANDS if name.startswith("-") else COMMANDS.commands.get(name)
    if command is None:
        return [name]
    known = {option for parameter in command.params for option in parameter.opts}
    given = arguments if command is COMMANDS else rest
    known.add("--help")
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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that the docs name."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt_token_ids": [*range(64), i], "max_tokens": 8} for i in range(4)]
    text = "\n".join(map(json.dumps, rows))
    for name in ("requests.jsonl", "TRACE"):
        Path(name).write_text(text)
    write_small(tmp_path)
    model = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    Path("FOLDER").mkdir()
    Path("FOLDER/config.json").write_text(json.dumps(model))
    return tmp_path


RUN_HERE = sorted(
    {
        shlex.join(line)
        for page in PAGES
        for line in commands(page.read_text())
        # One word names a command.
        if elsewhere(line) is None and (len(line) > 1 or line[0].startswith("-"))
    }
)


@pytest.mark.parametrize("line", RUN_HERE)
def test_every_command_runs(line: str, here: Path) -> None:
    if "--plot" in line:
        pytest.importorskip("matplotlib")
    done = CliRunner().invoke(app, shlex.split(line))
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout


def test_commands_that_do_not_run_here_have_a_test() -> None:
    shown = {elsewhere(line) for page in PAGES for line in commands(page.read_text())}
    assert set(ELSEWHERE.values()) <= shown
    for key, test in ELSEWHERE.items():
        assert key.split()[-1] in (ROOT / test).read_text(), f"{test} has no {key}"


def test_every_server_is_one_of_vllms_with_our_settings() -> None:
    """Options of `vllm serve` by vLLM's own parser, those of relay by ours."""
    vllm = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    parser = vllm.make_arg_parser(vllm.FlexibleArgumentParser(exit_on_error=False))
    lines = [line for page in PAGES for line in commands(page.read_text(), "vllm serve")]
    whole = [line for line in lines if line[0] == "MODEL"]
    assert whole
    for line in whole:
        given = parser.parse_args(line)
        settings = RelayConfig.from_additional_config(given.additional_config)
        assert ("--additional-config" in " ".join(line)) == (settings != RelayConfig())


def test_scripts_and_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        text = page.read_text()
        assert {line[0] for line in commands(text, "make")} <= targets, page.name
        for script, *rest in commands(text, "python"):
            if script == "-m":
                assert importlib.util.find_spec(rest[0]), f"{page.name}: {rest[0]}"
            else:
                assert (ROOT / script).is_file(), f"{page.name}: {script}"


def test_the_block_of_offline_batches_keeps_the_order_of_its_prompts() -> None:
    (block,) = (x for x in python_blocks("docs/usage.md") if "order(" in x)
    given = {
        "vllm_relay": vllm_relay,
        "prompts": ["b 1", "a 1", "b 2", "a 2"],
        "llm": SimpleNamespace(generate=lambda prompts, params: [x.upper() for x in prompts]),
        "sampling_params": None,
    }
    exec(block, given)
    assert given["outputs"] == ["B 1", "A 1", "B 2", "A 2"]


def test_the_block_of_the_ops_runs() -> None:
    (block,) = (x for x in python_blocks("docs/usage.md") if "relay_attention(" in x)
    given: dict[str, Any] = {}
    exec(block, given)
    assert given["out"].shape == given["q"].shape and given["out"].isfinite().all()


def test_every_page_is_in_the_site() -> None:
    index = (ROOT / "docs/index.md").read_text().splitlines()
    missing = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index", *index}
    assert missing == set()


def test_the_sizes_of_models_follow_from_their_shapes() -> None:
    text = (ROOT / "docs/remembering.md").read_text()
    rows = re.findall(
        r"^\| [\w.-]+ \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| (\d+) \|$", text, re.M
    )
    assert len(rows) == 12
    for layers, heads, size, kib, mib in rows:
        in_bf16 = 2 * 2 * int(layers) * int(heads) * int(size)
        assert (float(kib), int(mib)) == (in_bf16 / 2**10, round(in_bf16 * 2000 / 2**20))


def test_the_bytes_of_a_step_follow_from_the_models_shapes() -> None:
    text = (ROOT / "docs/decide.md").read_text()
    rows = re.findall(
        r"^\| [\w.-]+ \| ([\d.]+) \| (\d+) \| (\d+) \| (\d+) \| "
        r"([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        text,
        re.M,
    )
    assert len(rows) == 8
    requests, shared, own = 64, 8192, 512
    for parameters, layers, heads, size, *shown in rows:
        weights = 2 * float(parameters)
        per_token = 2 * 2 * int(layers) * int(heads) * int(size) / 1e9
        stock = per_token * requests * (shared + own)
        relay = per_token * (shared + requests * own)
        found = weights, stock, relay, (weights + stock) / (weights + relay)
        assert [f"{x:.1f}" for x in found] == shown
