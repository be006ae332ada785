"""Runs the parts of the soak by chunks; each chunk appends a row to the part's CSV.

    python -m tests.soak [--part NAME] [--chunks FIRST:END]

A chunk whose row is in ``benchmarks/results/soak/PART.csv`` for this revision, that of the package
and of the part, is skipped: a run that was ended goes on. The status is 1 if a chunk of this
revision has failures.

A part is a module of this package with ``CHUNKS`` and ``run_chunk(chunk)``, which returns columns
of its own and ``failures``; other modules of a part begin with its name.
"""

import argparse
import csv
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import RESULTS
from benchmarks.harness.result_csv import Row, read, revision, source

# What decides about the results, beside the part's own modules.
CODE = ("vllm_relay", "tests/engine", "tests/soak/seams.py")
PARTS = ("copies", "differential", "memory", "failures", "hostile", "kills", "uptime")


def run_part(
    path: Path, run_chunk: Callable[[int], Row], chunks: range, columns: dict[str, str]
) -> list[Row]:
    """Rows of these chunks at this revision; those that the CSV lacks are run and appended.

    Args:
        columns: provenance of this run, with its ``revision``. A dirty one is never skipped.
    """
    revision = columns["revision"]
    rows = [row for row in read(path) if row["revision"] == revision] if path.exists() else []
    rows = [row for row in rows if row["chunk"] in chunks]
    if revision.endswith("-dirty"):
        rows = []
    done = {row["chunk"] for row in rows}
    for chunk in chunks:
        if chunk in done:
            continue
        started = time.monotonic()
        row: dict[str, Any] = {"chunk": chunk, **run_chunk(chunk)}
        row |= {"seconds": round(time.monotonic() - started, 1), **columns}
        _append(path, row)
        rows.append(row)
        shown = ", ".join(f"{key} {value}" for key, value in row.items() if key not in columns)
        print(f"{path.stem}: {shown}", flush=True)
    return rows


def _append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Rows of another shape are of an older revision.
    new = not path.exists() or path.read_text().partition("\n")[0] != ",".join(row)
    with path.open("w" if new else "a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


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
        rows = run_part(path, part.run_chunk, chunks, columns)
        failed = sum(row["failures"] for row in rows)
        print(f"{name}: {len(rows)} chunks of revision {columns['revision']}, {failed} failures")
        failures += failed
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
