"""``vllm-relay`` as far as it needs no engine: what is shown, what is checked, what is refused."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.unit.system_kv.files import LAYERS, edit_header, write_small
from vllm_relay import __version__
from vllm_relay.cli import app
from vllm_relay.cli.engine import errors_of_the_engine
from vllm_relay.system_kv.file import SystemKVFile

ROOT = Path(__file__).parents[2]
VALUES = f"{LAYERS[1].name}.v"


def cli(*arguments: str | Path) -> Result:
    """Run a command in this process; the result has its ``stdout``, ``stderr``, ``exit_code``."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    # no traceback: what the command does not expect would be shown to its user as one
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments: str | Path) -> str:
    """The one line with which a command ends without doing anything."""
    result = cli(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("vllm-relay: ")
    return line.removeprefix("vllm-relay: ")


def rows(shown: str) -> dict[str, str]:
    """The table of `inspect`: its keys and its values, put together where they are folded."""
    found: dict[str, str] = {}
    key = ""
    for line in shown.splitlines():
        if line.startswith("│"):
            left, right = (cell.strip() for cell in line.strip("│").split("│"))
            key = left or key
            found[key] = f"{found[key]}\n{right}" if key in found else right
    return found


def damage(path: Path) -> Path:
    """Change a byte of the last tensor."""
    content = bytearray(path.read_bytes())
    content[-33] ^= 1  # before the seal
    path.write_bytes(content)
    return path


@pytest.fixture
def kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a good file, a damaged one, and none that is called missing.relay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_small(tmp_path)
    damage(write_small(tmp_path, name="damaged"))
    return tmp_path


def test_the_version_is_the_packages() -> None:
    result = cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"vllm-relay {__version__}\n")


def test_a_shell_completes_commands_and_options() -> None:
    """Asked as the lines ask that ``--install-completion`` adds to a shell's start."""

    def completed(line: str) -> set[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        environment = {"_VLLM_RELAY_COMPLETE": "complete_bash", **words}
        found = CliRunner().invoke(app, [], env=environment, prog_name="vllm-relay")
        return set(found.stdout.split())

    assert completed("vllm-relay in") == {"inspect"}
    assert "--system-prompt" in completed("vllm-relay build --sys")


@pytest.mark.parametrize(
    ("logged", "told"),
    [
        (
            "ERROR x\nValueError: no room for the KV cache\nRuntimeError: later",
            "no room for the KV",
        ),
        ("", "initialization failed. It logged no cause. Failed core proc(s): {'EngineCore': -9}"),
    ],
)
def test_a_failed_engine_has_its_cause_and_no_pointer(
    logged: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.delenv(name, raising=False)
    pointer = "initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}"
    local = SimpleNamespace(distributed_executor_backend=None)
    with pytest.raises(RuntimeError) as raised, errors_of_the_engine(local):
        config = json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text())
        Path(config["handlers"]["kept"]["filename"]).write_text(logged)
        raise RuntimeError(pointer)
    assert told in str(raised.value) and "above" not in str(raised.value)


# inspect


def test_a_table_shows_what_a_file_holds(kv: Path) -> None:
    result = cli("inspect", "acme.relay")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0].strip() == "acme.relay"
    assert rows(result.stdout) == {
        "prompt": "acme (system-prompt)",
        "text": "You are Acme's assistant. Sei höflich.",
        "tokens": "7",
        "size": "0.0 MB",
        "model": "/models/small",
        "layers": "2, KV heads x head size: 1 x 7, 3 x 5",
        "dtype": "bfloat16, KV cache auto",
        "quantization": "none",
        "RoPE": "rope_theta 10000.0, rope_type default",
        "weights": "a1" * 32,
        "tokenizer": "b2" * 32,
        "chat template": "c3" * 32,
        "engine": "device cpu, vllm 0.32.0",
        "created": "2026-01-31T12:00:00+01:00",
    }


def test_what_a_file_does_not_have_is_said(kv: Path) -> None:
    write_small(
        kv,
        kind="token-ids",
        text=None,
        tokenizer=None,
        chat_template=None,
        quantization="fp8",
        token_ids=tuple(range(1234)),
    )
    found = rows(cli("inspect", "acme.relay").stdout)
    assert found["prompt"] == "acme (token-ids)"
    assert found["text"] == "not known (built without a tokenizer)"
    assert (found["tokenizer"], found["chat template"]) == ("none", "none")
    assert (found["quantization"], found["tokens"]) == ("fp8", "1,234")
    size = (kv / "acme.relay").stat().st_size
    assert size > 100_000 and found["size"] == f"{size / 1e6:,.1f} MB"


def test_a_long_text_is_shown_by_its_ends_on_few_lines(kv: Path) -> None:
    text = "You are\n\n\tAcme's assistant. " + "word " * 1000 + "Never mention prices.\n"
    write_small(kv, text=text)
    shown = rows(cli("inspect", "acme.relay").stdout)["text"].replace("\n", " ")
    begin, end = shown.split(" … ")
    assert begin.startswith("You are Acme's assistant. word word ") and len(begin) <= 110
    assert end.endswith(" word Never mention prices.") and len(end) <= 45


def test_digests_are_whole_in_a_narrow_terminal(kv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    found = rows(cli("inspect", "acme.relay").stdout)
    assert found["weights"].replace("\n", "") == "a1" * 32
    assert "\n" in found["weights"]


@pytest.mark.parametrize(
    "text",
    ["[INST] Be brief. [/INST]", "a list[int], [bold]bold[/bold]", "[/]", "Say :warning: :smile:"],
)
def test_brackets_and_colons_of_a_prompt_are_shown(kv: Path, text: str) -> None:
    write_small(kv, text=text)
    assert rows(cli("inspect", "acme.relay").stdout)["text"] == text


@pytest.mark.parametrize("folder", ["[a]", "x["])
def test_brackets_of_a_path_are_shown(kv: Path, folder: str) -> None:
    good = Path(folder, "b].relay")  # "[/b]" would close what was never opened
    good.parent.mkdir()
    good.write_bytes(Path("acme.relay").read_bytes())
    bad = damage(write_small(good.parent))
    assert cli("inspect", good).stdout.splitlines()[0].strip() == str(good)
    lines = cli("verify", good, bad).stdout.splitlines()
    assert lines[0].startswith(f"good {good}: ") and lines[1].startswith(f"bad  {bad}: ")


def test_json_shows_all_of_several_files(kv: Path) -> None:
    other = write_small(kv, name="other", text='"[bold]\\ \n\u2028é🙂', token_ids=(1, 2))
    result = cli("inspect", "acme.relay", other, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    assert [entry["path"] for entry in shown] == ["acme.relay", str(other)]
    for entry in shown:
        file = SystemKVFile(entry["path"])
        assert (entry.pop("bytes"), entry.pop("seal")) == (file.size, file.seal)
        assert entry.pop("path") == str(file.path)
        assert entry == json.loads(file.manifest.to_json())
        assert entry.keys() == asdict(file.manifest).keys()


def test_inspect_reads_headers_only_and_verify_every_byte(kv: Path) -> None:
    assert rows(cli("inspect", "damaged.relay").stdout)["prompt"] == "damaged (system-prompt)"
    assert cli("verify", "damaged.relay").exit_code == 1


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_inspect_shows_nothing_when_one_file_cannot_be_read(kv: Path, flags: list[str]) -> None:
    assert refused("inspect", "acme.relay", "missing.relay", *flags) == (
        "missing.relay: No such file or directory"
    )
    edit_header(kv / "acme.relay", r"\"acme\"", r"\"acmf\"")
    assert "the manifest is not the one" in refused("inspect", "acme.relay", *flags)


# verify without a model


def test_good_files_are_good(kv: Path) -> None:
    write_small(kv, name="other", seed=1)
    result = cli("verify", "acme.relay", kv / "other.relay")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line, path in zip(lines, ("acme.relay", kv / "other.relay"), strict=True):
        assert re.fullmatch(rf"good {path}: every checksum \(\d+\.\d\d GB/s\)", line)


BAD = {
    "damaged.relay": f"tensor {VALUES} is damaged: checksum differs",
    "missing.relay": "No such file or directory",
    ".": "is a directory, not a system-KV file",
}


@pytest.mark.parametrize("path", BAD)
def test_a_bad_file_has_a_line_and_an_exit_status(kv: Path, path: str) -> None:
    result = cli("verify", path)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout == f"bad  {path}: {BAD[path]}\n"


def test_every_file_is_checked_whatever_the_others_are(kv: Path) -> None:
    result = cli("verify", "missing.relay", "acme.relay", "damaged.relay", ".")
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert lines[1].startswith("good acme.relay: every checksum (")
    del lines[1]
    assert lines == [f"bad  {p}: {BAD[p]}" for p in ("missing.relay", "damaged.relay", ".")]


@pytest.mark.parametrize("before", [True, False])
def test_verify_says_the_same_in_json(kv: Path, before: bool) -> None:
    files = ["damaged.relay", "acme.relay", "missing.relay"]
    result = cli("verify", *(["--json", *files] if before else [*files, "--json"]))
    assert (result.exit_code, result.stderr) == (1, "")
    shown = json.loads(result.stdout)
    (checked,) = shown[1].pop("checked")
    assert checked.startswith("every checksum (")
    assert shown == [
        {"path": "damaged.relay", "checked": [], "problems": [BAD["damaged.relay"]]},
        {"path": "acme.relay", "problems": []},
        {"path": "missing.relay", "checked": [], "problems": [BAD["missing.relay"]]},
    ]
    result = cli("verify", "acme.relay", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)[0]["problems"] == []


def test_a_path_is_named_as_it_was_given(kv: Path) -> None:
    (kv / "link.relay").symlink_to(kv / "damaged.relay")
    for path in ("damaged.relay", kv / "damaged.relay", "link.relay", f"../{kv.name}/link.relay"):
        assert cli("verify", path).stdout == f"bad  {path}: {BAD['damaged.relay']}\n"


# Arguments


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_command_without_files_is_refused(command: str) -> None:
    result = cli(command)
    assert result.exit_code == 2 and "Missing argument" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["acme.relay", "--recompute"], "--recompute needs --model"),
        (
            ["acme.relay", "--dtype", "float16"],
            "no such option without --model: --dtype",
        ),
        (["acme.relay", "--jsn"], "no such option without --model: --jsn"),
        (["--dtype", "float16", "acme.relay"], "name the files before vLLM's options"),
        (
            ["--model", "m", "--dtype", "float16", "acme.relay"],
            "name the files before vLLM's options",
        ),
    ],
)
def test_verify_refuses_what_makes_no_sense(kv: Path, arguments: list[str], message: str) -> None:
    assert refused("verify", *arguments) == message


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: prompts to build from, two of them of the same name."""
    monkeypatch.chdir(tmp_path)
    for name in ("acme.txt", "other.txt", "more/acme.md"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("Be brief.")
    Path("ids.json").write_text("[1, 2, 3]")
    return tmp_path


def build(*arguments: str | Path, output: str = "out.relay") -> str:
    """How `build` is refused, before it looks for the model; nothing is left behind."""
    before = sorted(Path().rglob("*"))
    message = refused("build", "--model", "no/such/model", "-o", output, *arguments)
    assert sorted(Path().rglob("*")) == before
    return message


def test_build_needs_a_model_and_an_output(sources: Path) -> None:
    for arguments, missing in (
        (["-o", "out.relay"], "--model"),
        (["--model", "m"], "--output"),
    ):
        result = cli("build", "--text", "acme.txt", *arguments)
        assert result.exit_code == 2 and f"'{missing}'" in result.stderr.replace("'-o' / ", "")


def test_nothing_to_build_is_refused(sources: Path) -> None:
    assert build() == "nothing to build: give --system-prompt, --text or --token-ids"


def test_several_prompts_need_a_folder(sources: Path) -> None:
    two = ["--system-prompt", "acme.txt", "--token-ids", "ids.json"]
    Path("file").write_text("")
    assert build(*two, output="file") == "file: 2 prompts need a folder, this is a file"
    Path("old.relay").write_text("")
    assert build(*two, output="old.relay") == "old.relay: 2 prompts need a folder, this is a file"
    assert build(*two, output="out.relay") == (
        "out.relay: 2 prompts need a folder; make it, or drop the dot"
    )


@pytest.mark.parametrize("folder", [".", "more", "new"])
def test_two_prompts_of_one_name_are_refused(sources: Path, folder: str) -> None:
    for kinds in (("--text", "--text"), ("--system-prompt", "--text")):
        arguments = [kinds[0], "acme.txt", "--text", "other.txt", kinds[1], "more/acme.md"]
        assert build(*arguments, output=folder) == (
            "two prompts would be written to acme.relay: rename one of their files"
        )


@pytest.mark.parametrize("kind", ["--system-prompt", "--text", "--token-ids"])
def test_a_source_that_cannot_be_read_is_named(sources: Path, kind: str) -> None:
    assert build(kind, "nope.txt").endswith("nope.txt: No such file or directory")
    assert build(kind, "more").endswith("more: Is a directory")
    Path("latin.txt").write_bytes("höflich".encode("latin-1"))
    assert build(kind, "latin.txt") == "latin.txt: is not UTF-8 text"


@pytest.mark.parametrize(
    "content",
    ["{}", '"1 2 3"', "7", "null", '{"token_ids": [1]}']
    + [f"[1, {entry}]" for entry in ('"2"', "2.0", "true", "null", "-1", "[2]", "NaN")],
)
def test_token_ids_must_be_a_list_of_token_ids(sources: Path, content: str) -> None:
    Path("ids.json").write_text(content)
    assert re.match(r"ids.json: (\[1\] )?must be ", build("--token-ids", "ids.json"))


@pytest.mark.parametrize("content", ["", "1, 2, 3", "[1, 2", "[1 2]"])
def test_token_ids_that_are_no_json_are_named(sources: Path, content: str) -> None:
    Path("ids.json").write_text(content)
    assert build("--token-ids", "ids.json").startswith("ids.json: is not JSON: ")


@pytest.mark.parametrize("option", ["--tools", "--chat-template-kwargs"])
def test_json_of_an_option_that_cannot_be_read_is_named(sources: Path, option: str) -> None:
    given = "acme.txt" if option == "--tools" else "{'a': 1}"
    message = build("--text", "acme.txt", option, given)
    assert "acme.txt" in message or option in message


def test_a_model_is_not_looked_for_before_the_arguments_are_right(sources: Path) -> None:
    # All of them name a model that there is not, and none of them is told so.
    for arguments in ([], ["--text", "nope.txt"], ["--token-ids", "acme.txt"]):
        assert "no/such/model" not in build(*arguments)


# The process


def process(script: str, *arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a line of Python or, as ``vllm-relay``, the installed command."""
    program = Path(sys.executable).with_name("vllm-relay")
    start = [program] if script == "vllm-relay" else [sys.executable, "-c", script]
    return subprocess.run(
        [*start, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )


def test_the_installed_command_says_what_it_can_and_ends_with_the_status(kv: Path) -> None:
    done = process("vllm-relay", "verify", "acme.relay", "damaged.relay", cwd=kv)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[1] == f"bad  damaged.relay: {BAD['damaged.relay']}"
    done = process("vllm-relay", "inspect", "missing.relay", cwd=kv)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "vllm-relay: missing.relay: No such file or directory\n"
    done = process("vllm-relay", "--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("build", "inspect", "verify"))


def test_files_are_looked_at_without_vllm(kv: Path) -> None:
    script = """
import sys
from vllm_relay.cli import app
for command in ("inspect", "verify"):
    app([command, "acme.relay"], standalone_mode=False)
assert not {"vllm", "transformers"} & sys.modules.keys()
"""
    done = process(script, cwd=kv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("good acme.relay: ")


def test_a_reader_that_went_away_is_no_error_to_be_shown(kv: Path) -> None:
    script = """
import os, subprocess, sys
read, write = os.pipe()
os.close(read)
done = subprocess.run(sys.argv[1:], stdout=write, stderr=subprocess.PIPE)
print(done.returncode, done.stderr.decode())
"""
    program = Path(sys.executable).with_name("vllm-relay")
    for arguments in (["inspect", "acme.relay"], ["inspect", "acme.relay", "--json"]):
        done = process(script, program, *arguments, cwd=kv)
        status, shown = done.stdout.rstrip("\n").split(" ", 1)
        assert int(status) != 0 and shown == ""


# build


@pytest.mark.parametrize("output", ["prompt.txt", "./prompt.txt", "linked.txt", "notes.md"])
def test_a_build_replaces_nothing_but_system_kv_files(kv: Path, output: str) -> None:
    Path("prompt.txt").write_text("You are Acme's assistant.")
    Path("notes.md").write_text("precious")
    Path("linked.txt").symlink_to("prompt.txt")
    line = refused("build", "--model", "no-model", "--text", "prompt.txt", "-o", output)
    assert line == f"{Path(output)}: is not a system-KV file; it is not replaced"
    assert Path("prompt.txt").read_text() == "You are Acme's assistant."
    assert Path("notes.md").read_text() == "precious"


def test_a_build_for_a_folder_looks_at_every_file_there(kv: Path) -> None:
    for name in ("acme.txt", "other.txt", "other.relay"):
        Path(name).write_text("text")
    given = ("--model", "no-model", "--text", "acme.txt", "--text", "other.txt", "-o", ".")
    assert refused("build", *given) == "other.relay: is not a system-KV file; it is not replaced"
