"""Build system-KV files with the real command and run engines that load them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engine.engine import environment, run_engine

BLOCK = 128


def relay_command(*arguments: Any) -> list[str]:
    """Command line of the `vllm-relay` beside this Python."""
    return [str(Path(sys.executable).parent / "vllm-relay"), *map(str, arguments)]


def build(output: Path, model: Path, tokens: list[int], *options: str, **env: str) -> Path:
    """Build a file from token ids."""
    source = output.with_suffix(".json")
    source.write_text(json.dumps(tokens))
    options = ("--token-ids", str(source), "-o", str(output), *options)
    run_relay("build", "--model", model, "--enforce-eager", *options, **env)
    return output


def run_relay(*arguments: Any, status: int = 0, **env: str) -> str:
    """Run `vllm-relay`; returns what it printed, on both channels."""
    done = subprocess.run(
        relay_command(*arguments),
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == status, done.stdout[-6000:]
    return done.stdout


def run_program(
    folder: Path, engine: dict[str, Any], program: list[list[Any]], **env: str
) -> tuple[list[Any], str]:
    """Results of `run_system_kv.py`, one per operation, and the log."""
    spec = {"engine": {"block_size": BLOCK, **engine}, "program": program}
    result = run_engine(folder, spec, "run_system_kv.py", **env)
    return result["results"], result["log"]
