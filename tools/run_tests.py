"""Run the tests: several pytest runs, side by side where each fills one core only.

    python tools/run_tests.py [RUN ...]

The last lines are each run's summary and their sum. The status is 1 if a run did not pass.
"""

import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine_sources import TRITON, WHEELS

ROOT = Path(__file__).resolve().parent.parent
JOBS = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pytest run: its arguments, and whether it fills both cores or runs beside another."""

    args: list[str]
    workers: int = 1


RUNS = {
    **{f"cuda-{version}": Run(args=["tests/triton/cuda", "--vllm", version]) for version in WHEELS},
    "interpreted": Run(args=["tests/triton/interpreted"]),
    "compiled": Run(args=["tests/triton/compiled"]),
    f"compiled-{TRITON}": Run(args=["tests/triton/compiled", "--triton", TRITON]),
    "unit": Run(args=["tests/unit"], workers=JOBS),
    "fast": Run(args=["tests/unit", "-m", "not slow"], workers=JOBS),
    "engine": Run(args=["tests/engine"], workers=JOBS),
    "benchmarks": Run(args=["tests/benchmarks"], workers=JOBS),
    # In one run the quick files fill the time that the last long one takes.
    "rest": Run(args=["tests/unit", "tests/engine", "tests/benchmarks"], workers=JOBS),
}
ALL = [name for name, run in RUNS.items() if run.workers == 1] + ["rest"]


@dataclass(frozen=True, kw_only=True)
class Done:
    name: str
    status: int
    output: str
    seconds: float


def execute(name: str) -> Done:
    run, started = RUNS[name], time.monotonic()
    command = [sys.executable, "-m", "pytest", "--durations=15", *run.args]
    if run.workers > 1:
        command += ["-n", str(run.workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    print(f"\n##### {name}: {' '.join(command[1:])}\n{done.stdout}", flush=True)
    return Done(name=name, status=done.returncode, output=done.stdout, seconds=seconds)


def main() -> int:
    names = sys.argv[1:] or ALL
    if unknown := [name for name in names if name not in RUNS]:
        sys.exit(f"run_tests: unknown run {', '.join(unknown)}; known: {', '.join(RUNS)}")
    started = time.monotonic()
    single = [name for name in names if RUNS[name].workers == 1]
    with ThreadPoolExecutor(JOBS) as pool:
        done = list(pool.map(execute, single))
    done += [execute(name) for name in names if name not in single]

    total: Counter[str] = Counter()
    for run in done:
        summary = run.output.strip().splitlines()[-1].strip("= ") if run.output.strip() else ""
        total.update({word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", summary)})
        print(f"{run.name:14} {'passed' if run.status == 0 else 'FAILED'}  {summary}")
    words = ("failed", "passed", "skipped", "error", "errors")
    counts = ", ".join(f"{total[word]} {word}" for word in words if total[word])
    print(f"===== {counts or 'no tests ran'} in {time.monotonic() - started:.2f}s =====")
    return int(any(run.status != 0 for run in done))


if __name__ == "__main__":
    sys.exit(main())
