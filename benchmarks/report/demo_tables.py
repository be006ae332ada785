"""Output of the demo: answers, agreement and speed of its servers, and its CSV rows.

`benchmarks/demo.py` makes one `Run` per server. The first run is the baseline.
"""

import argparse
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness.chat import Agreement, ChatAnswer, agreement, lead
from benchmarks.harness.environment import model_dtype

SHOWN = 6  # answers printed in full
# Effect of rounding on this model's log-probabilities (nats), should the control show less.
ROUNDING = {"auto": 0.03, "float32": 0.001}
# Key in the result of `vllm bench serve`, CSV column, title in the table.
BENCH_METRICS = (
    ("median_ttft_ms", "ttft_median_ms", "TTFT, median (ms, lower is better)"),
    ("median_tpot_ms", "tpot_median_ms", "TPOT, median (ms, lower is better)"),
    ("output_throughput", "output_tokens_per_s", "throughput (tokens/s, higher is better)"),
)


@dataclass(frozen=True)
class Run:
    """Result of one server.

    Attributes:
        label: its name in tables, no two alike.
        first_ttft: seconds to the first token of the first request, see `chat.first_ttft`.
        answers: to the questions, in order.
        again: the control: the same questions, asked again where `demo.run_server` says so;
            else `answers`.
        bench: result of `vllm bench serve`, None if that part was left out.
        bench_seconds: what that part took as a whole.
        counters: what relay counted; empty without relay.
        sharing: the log line that says who shares what.
        system_kv: what the log says of the system KV; empty without one.
    """

    label: str
    first_ttft: float
    answers: list[ChatAnswer]
    again: list[ChatAnswer]
    bench: dict[str, Any] | None
    bench_seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    sharing: str | None = None
    system_kv: tuple[str, ...] = ()


def show_answers(console: Console, asked: list[str], runs: list[Run]) -> None:
    """The first answers of two servers side by side; how many of a third are the second's."""
    first, second, *more = runs
    parted = agreement(first.answers, second.answers).partings
    table = Table(title="The same questions", show_lines=True, expand=True)
    table.add_column("question", ratio=2)
    table.add_column(first.label, ratio=4)
    table.add_column(second.label, ratio=4)
    rows = list(enumerate(zip(asked, first.answers, second.answers, strict=True)))
    for i, (question, a, b) in rows[:SHOWN]:
        other = Text(b.text) if i in parted else Text("(the same, token for token)", style="dim")
        table.add_row(question, Text(a.text), other)
    console.print(table)
    for run in more:
        same = agreement(second.answers, run.answers)
        console.print(
            f"{run.label}: {same.identical} of {same.answers} answers are the same as "
            f"{second.label}'s, token for token"
        )


def show_agreement(console: Console, runs: list[Run]) -> bool:
    """Prints the agreement of all servers with the first; returns True if all are close enough.

    The limit is twice the distance of the first server from itself.
    """
    first, *others = runs
    control = agreement(first.answers, first.again)
    found = {run.label: agreement(first.answers, run.answers) for run in others}
    table = Table(title=f"Agreement with the {control.answers} answers of {first.label}")
    for heading in ("", "identical answers", "mean log-prob difference", "largest"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, other in {f"{first.label}, asked again, half at a time": control, **found}.items():
        count = f"{other.identical} of {other.answers}"
        table.add_row(name, count, f"{other.mean:.4f} nats", f"{other.largest:.4f} nats")
    console.print(table)
    for run in others:
        show_partings(console, first, run, found[run.label])
    if any(other.partings for other in found.values()):
        console.print(
            "[dim]In small models two tokens often nearly tie; sums in another order can then "
            "flip the choice.[/]"
        )
    limit = 2 * max(control.mean, ROUNDING[model_dtype()])
    for label, other in found.items():
        verdict = "[green]passed" if other.mean <= limit else "[red]failed"
        console.print(
            f"{verdict}:[/] {label} differs from {first.label} by {other.mean:.4f} nats; the limit "
            f"is {limit:.4f} (twice what rounding does)"
        )
    return all(other.mean <= limit for other in found.values())


def show_partings(console: Console, first: Run, other: Run, found: Agreement) -> None:
    """Prints where answers part, and the lead of the chosen token there."""
    places = []
    for i, at in found.partings.items():
        ahead = lead(first.answers[i], other.answers[i], at)
        places.append(f"{i + 1}: {at + 1} ({ahead:.3f})")
    if places:
        console.print(
            f"Where {other.label} parts from {first.label}, as question: token (how far the best "
            f"token led there, nats)\n  {', '.join(places)}"
        )


def show_numbers(console: Console, runs: list[Run]) -> None:
    """The table of speed, and what the servers logged about it."""
    console.print(speed_table(runs))
    console.print(
        "[dim]TTFT: time to the first token. TPOT: time per token after it.\n"
        "The first request is measured once per server, after a short one without the system "
        "prompt.[/]"
    )
    for run in runs:
        if run.system_kv:
            there = "no gain there" if run.bench else "left out"
            why = (
                f"its file holds the chats' system prompt; vllm bench serve sends another: {there}"
            )
            for line in (why, *run.system_kv):
                console.print(f"[dim]{run.label}: {line}[/]")
    for run in runs:
        if run.sharing:
            console.print(f"{run.label}: {run.sharing}")
        if run.counters.get("steps_relayed") == 0:
            console.print(f"[yellow]{run.label}: no step had a group of requests that share.[/]")
        if run.counters:
            counts = ", ".join(f"{name} {count:,}" for name, count in run.counters.items())
            console.print(f"[dim]{run.label}: {counts}[/]")


def speed_table(runs: list[Run]) -> Table:
    """One column per server, then one per server but the first with the ratio to the first."""
    first, *others = runs
    table = Table(title="Speed: the first request, then vllm bench serve with one shared prefix")
    table.add_column("metric")
    names = [f"{r.label}\n(with offline\nsystem KV)" if r.system_kv else r.label for r in runs]
    for heading in (*names, *(f"{r.label}\n/ {first.label}" for r in others)):
        # The metric may wrap in a narrow terminal, numbers may not.
        table.add_column(heading, justify="right", no_wrap=True)
    title = "TTFT of the first request after start\n(ms, lower is better)"
    rows: dict[str, list[float | None]] = {title: [1000 * run.first_ttft for run in runs]}
    for key, _, title in BENCH_METRICS:
        rows[title] = [run.bench[key] if run.bench else None for run in runs]
    for title, (reference, *values) in rows.items():
        cells = ["-" if x is None else f"{x:,.1f}" for x in (reference, *values)]
        ratios = ["-" if not reference or x is None else f"{x / reference:.2f} x" for x in values]
        table.add_row(title, *cells, *ratios)
    # Without its bench part a server's count is not comparable.
    counts = [run.counters.get("kv_bytes_not_read", 0) if run.bench else None for run in runs]
    skipped = ["-" if count is None else human_bytes(count) for count in counts]
    table.add_row("KV bytes not read (chat and bench)", *skipped, *("" for _ in others))
    return table


def human_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def csv_rows(runs: list[Run], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per server: the load, the speed, the agreement with the first server, the counters.

    The first server's agreement is that with itself, asked again. What was not measured is empty.
    """
    first = runs[0]
    rows = []
    for run in runs:
        bench = run.bench
        close = agreement(first.answers, run.again if run is first else run.answers)
        rows.append(
            {
                "backend": run.label,
                "requests": args.requests,
                "prompt_tokens": args.prompt_tokens,
                "first_ttft_ms": f"{1000 * run.first_ttft:.3f}",
                **{
                    column: f"{bench[key]:.3f}" if bench else "" for key, column, _ in BENCH_METRICS
                },
                "answers_identical": close.identical,
                "mean_logprob_difference": f"{close.mean:.6f}",
                **{f"relay_{name}": count for name, count in run.counters.items()},
            }
        )
    return rows
