"""Runs the parts of the soak by chunks; each chunk appends a row to the part's CSV.

    python -m tests.soak [--part NAME] [--chunks FIRST:END]

A chunk whose row is in ``benchmarks/results/soak/PART.csv`` for this revision, that of the package
and of the part, is skipped: a run that was ended goes on. The status is 1 if a chunk of this
revision has failures.

A part is a module of this package with ``CHUNKS`` and ``run_chunk(chunk)``, which returns columns
of its own and ``failures``; other modules of a part begin with its name.
"""

import argparse
import importlib
import sys

from benchmarks.harness.environment import RESULTS
from benchmarks.harness.result_csv import revision, run_chunks, source

# What decides about the results, beside the part's own modules.
CODE = ("vllm_relay", "tests/engine", "tests/soak/seams.py")
PARTS = ("copies", "differential", "memory", "failures", "hostile", "kills", "saving", "uptime")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="all parts without it")
    parser.add_argument("--chunks", default=":", help="0:50 is the first fifty; default: all")
    args = parser.parse_args()
    provenance, failures = source(), 0
    for name in [args.part] if args.part else PARTS:
        columns = provenance | {"revision": revision(*CODE, f"tests/soak/{name}*.py")}
        part = importlib.import_module(f"tests.soak.{name}")
        path = RESULTS / "soak" / f"{name}.csv"
        first, _, end = args.chunks.partition(":")
        chunks = range(part.CHUNKS)[int(first or 0) : int(end or part.CHUNKS)]
        rows = run_chunks(path, part.run_chunk, chunks, columns)
        failed = sum(row["failures"] for row in rows)
        print(f"{name}: {len(rows)} chunks of revision {columns['revision']}, {failed} failures")
        failures += failed
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
