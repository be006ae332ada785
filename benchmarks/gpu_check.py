"""Check and measure relay on a machine with one Hopper GPU, in parts of less than ten minutes.

    python benchmarks/gpu_check.py [kernels] [parity] [op] [engine] [--out DIR] [--minutes 9]

kernels: every kernel against float64, the plan's time. parity: engines against float32, graphs on
and off, both runners. op: one layer's attention against stock FlashAttention 3 and FlashInfer.
engine: decode throughput against stock with prefix caching and vLLM's own cascade.

Each part writes a CSV of its own, a row per finished case, at once. A failing case prints FAIL and
the next goes on. Exit status: 0 all passed, 1 a case failed, 2 nothing could start. Not yet run on
a GPU.
"""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.journal import (  # noqa: E402
    Clock,
    DeviceLost,
    Journal,
    Selection,
    provenance,
    run_cases,
)

PARTS = ("kernels", "parity", "op", "engine")
# Status of a part's process that lost its device: the rest of its cases go to a new process.
LOST = 3
# Seconds that a part may take beyond its minutes before it is ended.
OVERTIME = 20.0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results"),
        help="folder of the CSV files; default $OUT, else benchmarks/results",
    )
    parser.add_argument("--quick", action="store_true", help="few cases, few repetitions")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of each part; no case starts that cannot end"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="shell patterns of the cases to run (of engines in parity and engine)",
    )
    # Only for the processes that this script starts: the CSV to continue, and until when.
    parser.add_argument("--csv", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    if given.minutes <= 0:
        parser.error("--minutes must be more than 0")
    given.parts = list(dict.fromkeys(given.parts)) or list(PARTS)
    return given


def run_part(part: str, args: argparse.Namespace) -> int:
    """One part in this process; returns its exit status."""
    module = importlib.import_module(f"benchmarks.gpu.{part}")
    journal = Journal(args.csv, module.COLUMNS, provenance())
    clock, chosen = Clock(args.until), Selection(args.cases)
    try:
        if hasattr(module, "run"):
            left_out = module.run(journal, clock, chosen, args.quick)
        else:
            left_out = run_cases(module.cases(args.quick), journal, clock, chosen)
    except DeviceLost as lost:
        print(f"{part}: the device is lost after {lost}; going on in a new process", flush=True)
        return LOST
    failed = journal.failed()
    for row in journal.rows:
        if "MISSED" in str(row.get("bar", "")):
            print(f"{part}: {row['case']}: {row['bar']}")
    if left_out:
        print(f"{part}: no time was left for: {'; '.join(left_out)}")
    print(f"{part}: {len(journal.rows) - len(failed)} passed, {len(failed)} failed: {args.csv}")
    return 1 if failed or not journal.rows else 0


def drive(part: str, args: argparse.Namespace) -> int:
    """One part in processes of its own; a lost device costs one case and not the rest."""
    csv = args.out / f"gpu-{part}-{datetime.now():%Y%m%d-%H%M%S}.csv"
    until = time.time() + 60 * args.minutes
    command = [sys.executable, str(Path(__file__).resolve()), part, "--csv", str(csv)]
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
    statuses = {part: drive(part, args) for part in args.parts}
    failed = [part for part, status in statuses.items() if status != 0]
    verdict = f"FAIL: {', '.join(failed)}" if failed else "all parts passed"
    print(f"gpu_check: {verdict}; {time.time() - started:.0f} s; CSVs in {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
