"""CSVs of benchmarks, read."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# Columns that are text, whatever they look like.
TEXT = ("date", "revision", "command", "vllm", "torch", "vllm_relay", "python")


def read(path: Path, text: Sequence[str] = TEXT) -> list[Row]:
    """Rows of a CSV; what looks like a number is one, but for the columns of text."""

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
