"""Tables of the report, and the ratios that are taken from its cases."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.result_csv import Row


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as vLLM with prefix caching relay is, in a case of a benchmark.

    Attributes:
        case: in words. kind: why there is little to gain, where that can be told from the case.
        system: label. times, least, most: median and range of the rounds.
    """

    case: str
    kind: str
    system: str
    times: float
    least: float
    most: float


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """In Markdown; columns that begin with a word are aligned to the left."""
    lines = [[str(cell) for cell in row] for row in rows]
    marks = [
        "---" if any(cell[:1].isalpha() for cell in column) else "---:"
        for column in zip(*lines, strict=True)
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in [headings, marks, *lines])


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def kind_of(row: Row) -> str:
    """Why a case has little to gain, from the columns that tell it."""
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
