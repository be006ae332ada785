"""Build system-KV files with the real command and run engines that load them."""

import json
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.engine.engine import run_apart, run_engine, run_forked

BLOCK = 128
COMMAND = Path(sys.executable).with_name("vllm-relay")


def build(output: Path, model: Path, tokens: list[int], *options: str, **env: str) -> Path:
    """Build a file from token ids."""
    source = output.with_suffix(".json")
    source.write_text(json.dumps(tokens))
    options = ("--token-ids", str(source), "-o", str(output), *options)
    run_relay("build", "--model", model, "--enforce-eager", *options, **env)
    return output


def run_relay(*arguments: Any, status: int = 0, **env: str) -> str:
    """Run `vllm-relay`; returns what it printed, on both channels.

    Commands that start an engine are forked as `run_engine`'s, unless there is an `env`. A forked
    process may add lines to the output of others.
    """
    forked = arguments[0] in ("build", "verify") and not env
    run = run_forked if forked else partial(run_apart, **env)
    with TemporaryDirectory() as folder:
        ended, text = run(COMMAND, list(map(str, arguments)), Path(folder))
    assert ended == status, text[-6000:]
    return text


def run_program(
    folder: Path, engine: dict[str, Any], program: list[list[Any]], **env: str
) -> tuple[list[Any], str]:
    """Results of `run_system_kv.py`, one per operation, and the log."""
    spec = {"engine": {"block_size": BLOCK, **engine}, "program": program}
    result = run_engine(folder, spec, "run_system_kv.py", **env)
    return result["results"], result["log"]
