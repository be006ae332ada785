"""Every benchmark of the report, one after the other, then the report.

    python benchmarks/run_all.py            (`make bench`; --full is `make bench-full`)

A benchmark that fails is named at the end; the others are measured all the same. Each writes a CSV
of its own, and no CSV is ever written over.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
# name -> options of the small grid, of the whole one
BENCHMARKS = {
    "serving": ("--rates 0.5 2 --repeats 2 --requests 24", ""),
    "throughput": (
        "--prefix 64 512 2048 --repeats 2",
        "--prefix 64 128 256 512 1024 2048 4096 8192 --mix 64 128 --mix 128 256 --mix 256 512",
    ),
    "fewshot": ("--questions 1 --repeats 2", ""),
    "needles": ("--document 2048 --repeats 2", "--document 6144 --questions 1 2 4 8 16 32 64"),
    "tree": ("--repeats 3", "--problem 0 256 512 1024 2048 4096"),
    "attention": ("--threads 1", ""),
    "decode": (
        "--shared 8192 2048 0 --repeats 3 --steps 24",
        "--shared 16384 8192 4096 2048 1024 0",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    args = parser.parse_args()
    console = Console(highlight=False)
    failed = []
    for name in args.only:
        options = BENCHMARKS[name][args.full].split()
        console.rule(name)
        begun = time.monotonic()
        script = str(ROOT / "benchmarks" / f"bench_{name}.py")
        if subprocess.run([sys.executable, script, *options, "--save"], check=False).returncode:
            failed.append(name)
        console.print(f"{name}: {time.monotonic() - begun:.0f} s")
    plot = [sys.executable, str(ROOT / "benchmarks" / "plot.py")]
    status = subprocess.run(plot, check=False).returncode
    if failed:
        console.print(f"[red]failed:[/] {', '.join(failed)}")
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main())
