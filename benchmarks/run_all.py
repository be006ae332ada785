"""Runs every suite of the report one after the other, then writes the report.

    python benchmarks/run_all.py            (`make bench`; --full is `make bench-full`)

A benchmark that fails is named at the end; the others are measured all the same. Each writes a CSV
of its own, and no CSV is ever written over. A run of the whole grid that was ended goes on: what
this machine has measured with the same code is not measured again, unless with --again.
"""

import argparse
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.environment import RESULTS, ROOT
from benchmarks.harness.result_csv import first_line, read, revision
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving.provenance import provenance


@dataclass(frozen=True)
class Run:
    """One run of a suite: options on the small grid (None: left out) and on the whole grid."""

    name: str
    small: str | None
    full: str


LITTLE_TO_GAIN = "--also 1 8192 64 --also 32 256 64 --also 4 256 2048"
OTHER_HEADS = "--also-heads 16 16 128 --also-heads 16 2 128 --also-heads 16 1 128"
TO_SATURATION = "--systems stock relay --rates 1 2 3 4 6 8"
RUNS = (
    Run(
        "serving",
        "--prefix-tokens 2000 --requests 16 --rates 2 4 6 --per-rate 16 --eager",
        f"--prefix-tokens 2000 {TO_SATURATION}",
    ),
    Run("serving", None, f"--prefix-tokens 1000 {TO_SATURATION}"),
    Run("serving", None, f"--prefix-tokens 4000 {TO_SATURATION}"),
    Run("serving", None, "--dataset prefix_repetition --prefix-tokens 2048 --prefixes 2"),
    Run("serving", None, "--dataset random --prefix-tokens 2048"),
    Run("system_kv", None, ""),
    Run(
        "throughput",
        "--prefix 64 2048 --requests 16 --repeats 3 --eager",
        "--prefix 64 128 256 512 1024 2048 4096 8192 --mix 64 128 --mix 128 256 --mix 256 512",
    ),
    Run(
        "fewshot",
        "--subjects 2 --examples 0 20 --questions 16 --repeats 3 --eager",
        "--examples 0 21 --without stock-no-caching",
    ),
    Run(
        "needles",
        "--document 2048 --questions 1 16 --repeats 3 --min-seconds 25 --eager",
        "--document 6144 --questions 1 4 16 64 256 --without stock-no-caching",
    ),
    Run(
        "completions",
        "--samples 1 8 40 --prompt-tokens 512 --repeats 1 --eager",
        "--without stock-no-caching",
    ),
    Run("llama_cpp", None, ""),
    Run("prepacking", "--prompts 8 --repeats 3 --eager", "--prompts 32 --repeats 5"),
    Run(
        "tree",
        "--problem 0 2048 --steps 16 --repeats 3 --eager",
        "--problem 0 256 512 1024 2048 4096",
    ),
    Run("attention", "--threads 1", ""),
    Run(
        "decode",
        f"--shared 8192 2048 0 --repeats 3 --min-seconds 15 --steps 16 {LITTLE_TO_GAIN} --eager",
        f"--shared 16384 8192 4096 2048 1024 0 {LITTLE_TO_GAIN}",
    ),
    Run("decode", None, "--shared 4096 --requests 1 2 4 8 16 32 64 128 --heads 16 4 128"),
    Run("decode", None, f"--shared 8192 0 --heads 16 4 128 {OTHER_HEADS} --repeats 5 --steps 24"),
    Run("prediction", None, "--repeats 3"),
)


# Paths whose content decides about a measurement.
CODE = ("vllm_relay", "benchmarks/suites", "benchmarks/harness", "requirements", "setup.py")


def measured(run: Run, options: list[str]) -> Path | None:
    """The CSV of this run on this machine with the code of now, or None."""
    command = shlex.join(["python", f"benchmarks/suites/bench_{run.name}.py", *options, "--save"])
    here = {**provenance(), "command": command}
    for path in sorted(RESULTS.glob(f"{run.name}-*.csv"), reverse=True):
        row = read(path)[0]
        alike = all(str(row.get(x)) == here[x] for x in ("command", "device", "cores", "vllm"))
        if alike and same_code(row["revision"]):
            return path
    return None


def same_code(then: str) -> bool:
    """True if the code of a clean revision is that of the working tree."""
    git = ("git", "-C", str(ROOT))
    if "dirty" in revision(*CODE) or not first_line(
        *git, "rev-parse", "--verify", f"{then}^{{commit}}"
    ):
        return False
    return not first_line(*git, "diff", "--name-only", then, "--", *CODE)


def status_of(command: list[str]) -> int:
    """Run it to its end; whatever ends us first lets it end in order."""
    child = subprocess.Popen(command)
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the whole grid")
    names = list(dict.fromkeys(run.name for run in RUNS))
    parser.add_argument(
        "--again", action="store_true", help="measure what --full has measured, too"
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    console = Console(highlight=False)
    failed = []
    started = time.monotonic()
    for run in RUNS:
        options = run.full if args.full else run.small
        if options is None or run.name not in args.only:
            continue
        console.rule(f"{run.name} {options}")
        if args.full and not args.again and (path := measured(run, options.split())):
            console.print(f"{run.name}: measured before, {path.relative_to(ROOT)}")
            continue
        begun = time.monotonic()
        script = str(ROOT / "benchmarks" / "suites" / f"bench_{run.name}.py")
        command = [sys.executable, script, *options.split(), "--save"]
        if status_of(command):
            failed.append(run.name)
        console.print(f"{run.name}: {time.monotonic() - begun:.0f} s")
    plot = [sys.executable, str(ROOT / "benchmarks" / "report" / "write_report.py")]
    plot += ["--failed", *dict.fromkeys(failed)] if failed else []
    status = status_of(plot)
    console.print(f"all of it: {(time.monotonic() - started) / 60:.1f} minutes")
    if failed:
        console.print(f"[red]failed:[/] {', '.join(failed)}")
    return 1 if failed or status else 0


if __name__ == "__main__":
    with ended_in_order():
        sys.exit(main())
