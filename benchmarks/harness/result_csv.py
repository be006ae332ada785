"""Result CSVs: written with provenance, never overwritten, read with types."""

import csv
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.environment import RESULTS, ROOT
from vllm_relay.serving.provenance import provenance

Row = dict[str, Any]
# Text columns, even where a cell looks like a number.
TEXT = ("date", "revision", "command", "vllm", "torch", "vllm_relay", "python")
# Outputs of benchmarks: they do not make a revision dirty.
GENERATED = ("benchmarks/REPORT.md", "benchmarks/results")


def first_line(*command: str) -> str:
    """First line that a command prints, or "" if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def revision(*paths: str) -> str:
    """Short git revision, with ``-dirty`` if tracked files other than `GENERATED` changed.

    With ``paths`` the last revision that changed one of them, dirty by these only. Copies without
    history give ``VLLM_RELAY_REVISION`` or "none".
    """
    git = ("git", "-C", str(ROOT))
    found = first_line(*git, "log", "-1", "--format=%h", "--", *paths)
    exclude = [f":!{path}" for path in GENERATED]
    changed = found and first_line(
        *git, "diff", "--name-only", "HEAD", "--", *(paths or "."), *exclude
    )
    return (found or os.environ.get("VLLM_RELAY_REVISION", "none")) + ("-dirty" if changed else "")


def source() -> dict[str, str]:
    """Provenance columns of this run: those of `provenance`, the revision and the command."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    command = shlex.join(["python", str(shown), *sys.argv[1:]])
    return provenance() | {"revision": revision(), "command": command}


def read(path: Path, text: Sequence[str] = TEXT) -> list[Row]:
    """Rows of a CSV; cells outside text columns become numbers where they look like one."""

    def value(name: str, cell: str) -> Any:
        for kind in () if name in text else (int, float):
            try:
                return kind(cell)
            except ValueError:
                continue
        return cell

    with path.open(newline="") as file:
        return [
            {name: value(name, cell) for name, cell in row.items()} for row in csv.DictReader(file)
        ]


def write_csv(path: Path, rows: Sequence[Row], columns: dict[str, str]) -> Path:
    """Writes rows, each with these columns added, to a new file; returns its path.

    `results/demo.csv` becomes `results/demo-20260131-120000.csv`: no measurement is overwritten.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("rows is empty: nothing was measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(key for row in rows for key in (*row, *columns)))
    stem = f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    attempt = 1
    while True:
        name = f"{stem}{'' if attempt == 1 else f'-{attempt}'}{path.suffix}"
        try:
            with (path.parent / name).open("x", newline="") as file:
                writer = csv.DictWriter(file, names, restval="")
                writer.writeheader()
                writer.writerows({**row, **columns} for row in rows)
        except FileExistsError:
            attempt += 1
            continue
        return path.parent / name


def save(console: Console, name: str, rows: Sequence[Row], **columns: str) -> Path:
    """Writes a CSV with provenance to benchmarks/results; returns its path."""
    path = write_csv(RESULTS / f"{name}.csv", rows, source() | columns)
    console.print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path


def run_chunks(
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
