"""Markdown tables, and the speed-up ratios of the report."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.result_csv import Row


@dataclass(frozen=True)
class Ratio:
    """Speed-up of a system over vLLM with prefix caching in one workload.

    Attributes:
        case: the workload as text. kind: why there is little to gain; "" if nothing says so.
        system: label. times, least, most: median and range of the rounds.
    """

    case: str
    kind: str
    system: str
    times: float
    least: float
    most: float


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Markdown table; columns with a cell that begins with a letter are aligned to the left."""
    lines = [[str(cell) for cell in row] for row in rows]
    marks = [
        "---" if any(cell[:1].isalpha() for cell in column) else "---:"
        for column in zip(*lines, strict=True)
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in [headings, marks, *lines])


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def kind_of(row: Row) -> str:
    """Reason why a workload has little to gain, from its columns; "" without one."""
    requests = row.get("questions" if "document_tokens" in row else "requests")
    shared = row.get("shared_tokens", row.get("prefix_tokens"))
    own = row.get("own_tokens", row.get("context_tokens"))
    if requests == 1:
        return "one request"
    if shared == 0:
        return "nothing shared"
    if shared is not None and own is not None and own > shared:
        return "contexts longer than the prefix"
    if shared is not None and shared <= 256:
        return "short prefix"
    return ""
