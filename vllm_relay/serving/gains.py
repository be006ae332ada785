"""Summary of a comparison's rows: medians over rounds, speed-ups, the rate within a bound."""

import math
import statistics
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_relay.serving.systems import REFERENCE, SYSTEMS

Row = dict[str, Any]
MEDIANS = (
    *("tokens_per_s", "requests_per_s", "normalized_s"),
    *("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"),
)


def summary(rows: Sequence[Row]) -> list[Row]:
    """Per rate and system: medians over rounds, and ratios to vLLM in the same round."""
    gains = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        at_rate = [row for row in rows if row["rate"] == rate]
        baseline = {row["round"]: row for row in at_rate if row["system"] == REFERENCE}
        for key in SYSTEMS:
            found = [row for row in at_rate if row["system"] == key]
            if not found:
                continue
            gain: Row = {"rate": rate, "system": key, "rounds": len(found)}
            gain |= {name: statistics.median(row[name] for row in found) for name in MEDIANS}
            more = [x["tokens_per_s"] / baseline[x["round"]]["tokens_per_s"] for x in found]
            faster = [baseline[x["round"]]["normalized_s"] / x["normalized_s"] for x in found]
            gain["times_throughput"] = round(statistics.median(more), 4)
            gain["times_latency"] = round(statistics.median(faster), 4)
            gain["times_latency_min"] = round(min(faster), 4)
            gain["times_latency_max"] = round(max(faster), 4)
            gains.append(gain)
    return gains


def sustained(rows: Sequence[Row], bound: float) -> dict[str, float | None]:
    """Per system: the highest rate (requests per second) that stays within a latency bound.

    Rates count up to the first whose median normalized latency exceeds the bound (seconds per
    token); None if the lowest does. Requests sent all at once have no rate.
    """
    held: dict[str, float | None] = {}
    for key in SYSTEMS:
        found = [row for row in rows if row["system"] == key and not math.isinf(row["rate"])]
        if found:
            held[key] = None
        for rate in sorted({row["rate"] for row in found}):
            if statistics.median(x["normalized_s"] for x in found if x["rate"] == rate) > bound:
                break
            held[key] = rate
    return held


def rate_text(rate: float, unit: str = "") -> str:
    return "all at once" if math.isinf(rate) else f"{rate:g}{unit}"


def cells(gain: Row) -> dict[str, str]:
    """One row of the table: heading -> text with its unit."""
    return {
        "requests/s": rate_text(gain["rate"]),
        "system": SYSTEMS[gain["system"]].label,
        "tokens/s": f"{gain['tokens_per_s']:,.0f}",
        "TTFT": f"{gain['ttft_p50_s']:.3f} s",
        "TPOT": f"{1e3 * gain['tpot_p50_s']:.1f} ms",
        "s/token": f"{gain['normalized_s']:.4f}",
        "times vLLM": f"{gain['times_latency']:.2f}",
        "least to most": f"{gain['times_latency_min']:.2f} to {gain['times_latency_max']:.2f}",
    }


def held_lines(rows: Sequence[Row], bound: float) -> list[str]:
    """Sustained rate of each system as text; empty if no rate was measured."""
    lines = []
    for key, rate in sustained(rows, bound).items():
        held = "none of the rates" if rate is None else f"{rate:g} requests/s"
        if rate == max({row["rate"] for row in rows if row["system"] == key} - {math.inf}):
            held = f"at least {held}, the highest tried"
        lines.append(f"within {bound:g} s per token: {SYSTEMS[key].label}: {held}")
    return lines


def legend(rows: Sequence[Row]) -> str:
    """Meaning of the columns, and the largest distance of answers."""
    largest = max(row["logprob_rms"] for row in rows)
    once = {row["round"] for row in rows} == {1}
    return (
        "TTFT and TPOT: medians of requests. s/token: latency per output token, mean of requests. "
        "times vLLM: vLLM's s/token over the system's in the same round. Log-probabilities of "
        f"greedy answers differ from vLLM's by {largest:.3f} nats at most (rms of a system)."
        f"{' One round: its least and most are one figure.' if once else ''}"
    )


def show(console: Console, title: str, rows: Sequence[Row], bound: float | None = None) -> None:
    """Prints the table and, with a bound, the sustained rates."""
    table = Table(title=title)
    gains = summary(rows)
    for heading in cells(gains[0]):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for _, of_rate in groupby(gains, key=itemgetter("rate")):
        for i, gain in enumerate(of_rate):
            rate, *others = cells(gain).values()
            table.add_row("" if i else rate, *others)
        table.add_section()
    console.print(table)
    for line in [legend(rows), *([] if bound is None else held_lines(rows, bound))]:
        console.print(line, soft_wrap=True)
