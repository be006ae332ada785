"""What `vllm-relay calibrate` refuses, before any engine starts."""

import pytest
from typer.testing import CliRunner

from vllm_relay.cli import app


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
