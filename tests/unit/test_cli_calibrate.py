"""What `vllm-relay calibrate` refuses, before any engine starts."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_relay.cli import app, calibrate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --model or --shape"),
        (["--model", "m", "--shape", "8/2/64"], "give --model or --shape"),
        (["--shape", "8x2x64"], "--shape: expected HEADS/KV_HEADS/SIZE, got '8x2x64'"),
        (["--shape", "8/0/64"], "--shape: expected HEADS/KV_HEADS/SIZE, got '8/0/64'"),
        (["--shape", "8/3/64"], "--shape: 8 heads are no multiple of 3 KV heads"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["calibrate", *arguments])
    assert done.exit_code == 1
    assert done.stderr.strip() == f"vllm-relay: {message}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("file/devices.json", None, "Not a directory"),
        ("file/folder/devices.json", None, "Not a directory"),
        ("folder", None, "Is a directory"),
        ("devices.json", "{", "Expecting property name"),
    ],
)
def test_a_result_that_could_not_be_kept_is_not_measured(
    name: str, content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    output = tmp_path / name
    if content is not None:
        output.write_text(content)
    module = sys.modules[calibrate.__module__]
    monkeypatch.setattr(module, "_measure", lambda _: pytest.fail("measured"))
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["calibrate", "--shape", "8/2/64", "-o", str(output)])
    assert done.exit_code == 1
    assert done.stderr.startswith("vllm-relay: ") and done.stderr.count("\n") == 1
    assert message in done.stderr and str(tmp_path) in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
