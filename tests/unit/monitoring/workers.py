"""Workers for the tests of monitoring: processes that answer at the channel as an engine's do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_relay.monitoring import channel

ROOT = Path(__file__).parents[3]
_WORKER = """
import json, sys, time
from vllm_relay.monitoring import channel
name, report, seconds = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
def answer():
    time.sleep(seconds)
    return report
channel.answer(name, answer)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def worker(name: str, report: str, seconds: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """A process that answers with a report (JSON) after so many seconds."""
    child = subprocess.Popen(
        [sys.executable, "-c", _WORKER, name, report, str(seconds)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def heard(count: int, ask: Any = channel.ask) -> Any:
    """Answer of `ask` once it has that many entries: a busy machine answers late."""
    for _ in range(100):
        if len(found := ask()) == count:
            return found
    raise AssertionError(f"{len(found)} answers, not {count}")
