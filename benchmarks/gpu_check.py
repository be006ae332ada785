"""Check and measure relay on a machine with one Hopper GPU, in parts of less than ten minutes.

    python benchmarks/gpu_check.py --quick
    python benchmarks/gpu_check.py [kernels] [parity] [op] [engine-8b] [engine-7b] [--minutes 9]

--quick without parts takes four minutes: is FlashAttention right as relay calls it, with padded
rows, too, are our kernels, and does a small model in full graphs answer as exactly as stock?

kernels: every kernel against float64, the plan's time. parity: engines against float32, graphs on
and off, both runners. op: one layer's attention against stock FlashAttention 3 and FlashInfer.
engine-8b, engine-7b (engine: both): decode throughput on the shape of Llama-3-8B and Llama-2-7B
against stock with prefix caching and vLLM's own cascade.

Each part writes a CSV of its own, a row per finished case, at once; --resume goes on with the one
that an earlier run left. A failing case prints FAIL and the next goes on. Exit status: 0 if all
cases ran and passed and no bar was missed, 1 if not (the last line names each: failed, missed, left
out for lack of time), 2 if nothing could start.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.journal import (  # noqa: E402
    PASS,
    Clock,
    DeviceLost,
    Journal,
    Selection,
    run_cases,
    source,
)

PARTS = ("kernels", "parity", "op", "engine-8b", "engine-7b")
# Without parts, --quick runs these, and each has so many minutes: engines start slowly when cold.
QUICK_PARTS, QUICK_MINUTES = PARTS[:2], 3.5
MINUTES = 9.0
ALIASES = {"engine": ("engine-8b", "engine-7b")}
# Status of a part's process that lost its device: the rest of its cases go to a new process.
LOST = 3
# Seconds that a part may take beyond its minutes before it is ended.
OVERTIME = 20.0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}, engine (both); default all"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results"),
        help="folder of the CSV files; default $OUT, else benchmarks/results",
    )
    parser.add_argument("--quick", action="store_true", help="few cases, few repetitions")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"of each part; no case starts that cannot end; default {MINUTES:g}, of --quick alone "
        f"{QUICK_MINUTES:g}",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the newest CSV of each part in --out, if of this revision",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="shell patterns of the cases to run (of engines in parity and engine)",
    )
    # Only for the processes that this script starts: the CSV to continue, until when, the report.
    parser.add_argument("--csv", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.parts = [name for part in given.parts for name in ALIASES.get(part, (part,))]
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    short = given.quick and not given.parts
    if given.minutes is None:
        given.minutes = QUICK_MINUTES if short else MINUTES
    if given.minutes <= 0:
        parser.error("--minutes must be more than 0")
    given.parts = list(dict.fromkeys(given.parts)) or list(QUICK_PARTS if short else PARTS)
    return given


def module_of(part: str) -> tuple[Any, tuple[str, ...]]:
    """The module of a part, and what its ``run`` has to be told beside the rest."""
    name, _, which = part.partition("-")
    return importlib.import_module(f"benchmarks.gpu.{name}"), (which,) if which else ()


def run_part(part: str, args: argparse.Namespace) -> int:
    """One part in this process; returns its exit status."""
    module, told = module_of(part)
    journal = Journal(args.csv, module.COLUMNS, source())
    clock, chosen = Clock(args.until), Selection(args.cases)
    try:
        if hasattr(module, "run"):
            left_out = module.run(journal, clock, chosen, args.quick, *told)
        else:
            left_out = run_cases(module.cases(args.quick), journal, clock, chosen)
    except DeviceLost as lost:
        print(f"{part}: the device is lost after {lost}; going on in a new process", flush=True)
        return LOST
    args.report.write_text(json.dumps(left_out))
    failed, missed = len(journal.failed()), len(journal.missed())
    print(
        f"{part}: {len(journal.rows) - failed} passed, {missed} of them missed a bar, "
        f"{failed} failed, {len(left_out)} left out: {args.csv}"
    )
    return 1 if trouble_in(journal, left_out) else 0


def trouble_in(journal: Journal, left_out: list[str]) -> list[str]:
    """Failures of a part, a line each: failed, missed or left-out cases."""
    lines = [f"failed: {name}" for name in journal.failed()]
    lines += [f"missed: {name}" for name in journal.missed()]
    lines += [f"left out: {name}" for name in left_out]
    return lines if lines or journal.rows else ["no case ran"]


def drive(part: str, args: argparse.Namespace) -> list[str]:
    """One part in processes of its own; returns what is not as it should be."""
    csv = args.out / f"gpu-{part}-{datetime.now():%Y%m%d-%H%M%S}.csv"
    if args.resume:
        csv = left_by_an_earlier_run(part, args) or csv
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "left_out.json"
        status = run_processes(part, args, csv, report)
        if status == 0:
            return []
        left_out = json.loads(report.read_text()) if report.exists() else None
    rows = trouble_in(Journal(csv, (), {}), left_out or []) if csv.exists() else []
    if left_out is None:
        rows.append("lost the device" if status == LOST else "ended before its last case")
    return rows


def left_by_an_earlier_run(part: str, args: argparse.Namespace) -> Path | None:
    """The newest CSV of a part, if it is of this revision and device, and quick if this run is.

    Cases that failed are taken out: they run again.
    """
    of_now, files = source(), sorted(args.out.glob(f"gpu-{part}-*.csv"))
    for csv in files[-1:] if not of_now["revision"].endswith("-dirty") else []:
        row = next(iter(Journal(csv, (), {}).rows), None)
        if row is None or ("--quick" in row["command"]) != args.quick:
            continue
        if all(row[name] == of_now[name] for name in ("revision", "device")):
            columns = [name for name in row if name not in ("case", "status", "failure", *of_now)]
            journal = Journal(csv, columns, of_now)
            journal.keep([row for row in journal.rows if row["status"] == PASS])
            return csv
    return None


def run_processes(part: str, args: argparse.Namespace, csv: Path, report: Path) -> int:
    """Run a part's process; again for the rest where it lost its device, which costs one case.

    Args:
        csv: to continue. report: to be written at the end, the cases left out.

    Returns:
        the last one's exit status.
    """
    until = time.time() + 60 * args.minutes
    command = [sys.executable, str(Path(__file__).resolve()), part, "--csv", str(csv)]
    command += ["--report", str(report)]
    command += ["--until", str(until), *(["--quick"] if args.quick else [])]
    if args.cases:
        command += ["--cases", *args.cases]
    status = LOST
    while status == LOST and time.time() < until:
        child = subprocess.Popen(command)
        try:
            status = child.wait(max(1.0, until - time.time()) + OVERTIME)
        except subprocess.TimeoutExpired:
            print(f"{part}: ended, it ran past its time: {csv}", flush=True)
            status = 1
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(5)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
    return status


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: needs a CUDA GPU; torch sees none", file=sys.stderr)
        return 2
    if args.csv is not None:
        # So that the engines it started are ended, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        return run_part(args.parts[0], args)
    started = time.time()
    trouble = [f"{part}: {line}" for part in args.parts for line in drive(part, args)]
    verdict = f"NOT PASSED: {'; '.join(trouble)}" if trouble else "all parts passed"
    print(f"gpu_check: {verdict}; {time.time() - started:.0f} s; CSVs in {args.out}")
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
