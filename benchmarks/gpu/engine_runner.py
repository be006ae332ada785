"""Start engine processes, read their rows as they come, end them in time."""

import json
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.gpu.journal import Clock, Journal, Row, Wrong, describe
from benchmarks.harness.environment import importable
from vllm_relay.serving.processes import Process

# In-process engines: what is patched in the child is patched where the model runs.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONUNBUFFERED": "1",
}
# Seconds after the end of a part in which a child may finish its case.
GRACE = 10.0
_LOG_LINES = 40


class EngineFailed(RuntimeError):
    """An engine process ended with an error; the end of its log was printed."""


def rows_of(
    spec: dict[str, Any], folder: Path, name: str, clock: Clock, extra: dict[str, str]
) -> Generator[Row, None, None]:
    """Run `engine_process` on `spec`; yields its rows as it writes them.

    Args:
        folder: for its files; `name` tells them apart. extra: environment variables.

    Raises:
        EngineFailed: it ended with an error, or had to be ended `GRACE` seconds after the part.
    """
    spec_path, rows_path, log_path = (folder / f"{name}.{kind}" for kind in ("json", "rows", "log"))
    spec_path.write_text(json.dumps({**spec, "until": clock.until}))
    rows_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.engine_process"]
    child = Process(
        [*command, str(spec_path), str(rows_path)], log_path, ENVIRONMENT | importable() | extra
    )
    read = 0
    try:
        while True:
            ended = child.poll() is not None
            lines = rows_path.read_text().split("\n")[:-1] if rows_path.exists() else []
            for line in lines[read:]:
                read += 1
                yield json.loads(line)
            if ended:
                break
            if clock.left() < -GRACE:
                raise EngineFailed(f"{name}: ended, its time was up")
            time.sleep(0.2)
        if child.poll() != 0:
            raise EngineFailed(_failure(name, child))
    finally:
        child.kill()


def _failure(name: str, child: Process) -> str:
    """Prints the end of an engine's log; returns the failure in one line."""
    lines = child.text().splitlines()
    print(f"--- the end of the log of {name}:", *lines[-_LOG_LINES:], "---", sep="\n", flush=True)
    errors = [line for line in lines if "Error" in line and "Traceback" not in line]
    return f"{name} ended with status {child.poll()}: {(errors or lines or [''])[-1].strip()}"


def record(
    rows: Generator[Row, None, None],
    cases: list[Row],
    title: str,
    journal: Journal,
    shared: Callable[[Row, Row], Row],
    judge: Callable[[Row, Row], Row],
) -> list[str]:
    """Write an engine's rows to the journal as they come.

    Args:
        rows: of `rows_of`; closed, whatever happens. cases: what the engine was asked, by ``name``.
        shared, judge: columns of (case, row): those that describe it, and those of its result;
            `judge` raises Wrong.

    Returns:
        names of the cases that were not reached. Where the engine failed, the first of them has a
        FAIL row instead.
    """
    missing = {case["name"]: case for case in cases}
    left_out = []
    failure = ""
    try:
        with closing(rows):
            for row in rows:
                case = missing.pop(row["name"])
                name = f"{title}: {case['name']}"
                if row.get("left_out"):
                    left_out.append(name)
                    continue
                described = shared(case, row)
                try:
                    if "error" in row:
                        raise Wrong(row["error"])
                    journal.add(name, described | judge(case, row))
                except Wrong as error:
                    journal.add(name, described | error.row, str(error))
    except EngineFailed as error:
        failure = describe(error)
    for i, name in enumerate(missing):
        if i == 0:
            journal.add(f"{title}: {name}", {}, failure or "the engine gave no result")
        else:
            left_out.append(f"{title}: {name}")
    return left_out
