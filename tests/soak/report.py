"""``python -m tests.soak.report``: docs/reliability.md from the parts' docstrings and CSVs.

A part is shown by the rows of the newest revision at which it was run whole, or else of its CSV's
last row.
"""

import importlib
import inspect
from typing import Any

from benchmarks.harness.environment import RESULTS, ROOT
from benchmarks.harness.result_csv import Row, read
from tests.soak.__main__ import PARTS

PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# Reliability

What relay is put through, and what came of it. `make soak` runs the parts below, for hours; each
chunk adds a row to a CSV in `benchmarks/results/soak`, of which `python -m tests.soak.report` makes
this page. `make test` runs a sample of every part, and plants faults which that part has to find.
"""
# Columns of options; and those that are not added up.
_NOT_SHOWN = ("block_size", "workers")
_LARGEST = (
    "largest_difference",
    "limit_bytes",
    "peak_bytes",
    "peak_anonymous_bytes",
    "stated_gib",
    "packed_gib",
    "kv_bytes",
    "first_n",
)


def page() -> str:
    """The page's text."""
    return "\n".join([HEAD, *(_section(part) for part in PARTS)])


def _section(part: str) -> str:
    module = importlib.import_module(f"tests.soak.{part}")
    title, _, text = inspect.cleandoc(module.__doc__ or "").partition(": ")
    text = text.partition("\n\n    python -m")[0]
    path = RESULTS / "soak" / f"{part}.csv"
    lines = [f"## {title}", "", text[0].upper() + text[1:], ""]
    if not path.exists():
        return "\n".join([*lines, "Not run yet.", ""])
    rows = _newest(read(path), module.CHUNKS)
    last = rows[-1]
    minutes = sum(row["seconds"] for row in rows) / 60
    devices = " and ".join(dict.fromkeys(row["device"] for row in rows))
    where = f"{devices}, {last['cores']} cores, vLLM {last['vllm']}"
    csv = f"[CSV](../benchmarks/results/soak/{part}.csv)"
    lines += [
        f"{len(rows)} of {module.CHUNKS} chunks, {minutes:.0f} minutes, {where},",
        f"revision {last['revision']}, {last['date'][:10]} ({csv}):",
        "",
        "| | |",
        "|---|---:|",
    ]
    lines += [f"| {name.replace('_', ' ')} | {value:,} |" for name, value in _totals(rows).items()]
    return "\n".join([*lines, ""])


def _newest(rows: list[Row], chunks: int) -> list[Row]:
    """Rows of the newest revision that has all chunks, or else of the last row's."""
    of: dict[str, list[Row]] = {}
    for row in reversed(rows):
        of.setdefault(row["revision"], []).insert(0, row)
    return next((found for found in of.values() if len(found) == chunks), next(iter(of.values())))


def _totals(rows: list[Row]) -> dict[str, Any]:
    """Columns that count something, those of all parts left out; added up, or the largest."""
    names = list(rows[0])
    totals = {}
    for name in names[names.index("chunk") + 1 : names.index("seconds")]:
        values = [row[name] for row in rows]
        if name not in _NOT_SHOWN and all(isinstance(value, (int, float)) for value in values):
            totals[name] = max(values) if name in _LARGEST else sum(values)
    return totals


if __name__ == "__main__":
    PAGE.write_text(page())
