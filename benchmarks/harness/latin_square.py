"""Systems that take turns on the same prompts: what is measured, checked, shown and kept."""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.engines import Engine, Limits, engines
from benchmarks.harness.environment import HUGE_PAGES, ROOT, kv_gib, provenance, step, write_csv
from vllm_relay.serving.serving import Answer, Distance, WrongAnswers, distance, in_turn
from vllm_relay.serving.systems import REFERENCE, SYSTEMS


@dataclass
class Measured:
    """Of one case: what each system took, in rounds in which all had the same prompts."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    decode_tok_s: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    # Of a system's answers from those of the reference, the round in which it is largest.
    distances: dict[str, Distance] = field(default_factory=dict)
    # What each relay engine counted meanwhile, see `vllm_relay.metrics.counters`.
    counted: dict[str, dict[str, int]] = field(default_factory=dict)
    right: dict[str, int] = field(default_factory=dict)

    def speed_up(self, key: str) -> tuple[float, float, float]:
        """Of a system over the reference: median, least and most of the rounds."""
        ratios = [a / b for a, b in zip(self.seconds[REFERENCE], self.seconds[key], strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)

    def wrong(self) -> list[str]:
        """What is wrong with the answers, in words; no speed means anything then.

        Of systems that attend, those whose answers are not the reference's. The one that skips
        attention is the control: where its answers pass, the check sees nothing.
        """
        return [
            f"{SYSTEMS[key].label}: {found}"
            + ("" if SYSTEMS[key].attention else ": this case's answers do not tell")
            for key, found in self.distances.items()
            if found.agrees != SYSTEMS[key].attention
        ]

    def rows(self, **case: Any) -> list[dict[str, Any]]:
        """Of a CSV, one per system."""
        rows = []
        for key, taken in self.seconds.items():
            row = {**case, "system": key, "rounds": len(taken), "tokens": self.tokens}
            for name, value in zip(
                ("seconds", "seconds_min", "seconds_max"),
                (statistics.median(taken), min(taken), max(taken)),
                strict=True,
            ):
                row[name] = round(value, 4)
            row["tok_s"] = round(self.tokens / statistics.median(taken), 2)
            names = ("times_as_fast_as_stock", "times_min", "times_max")
            ratios = zip(names, self.speed_up(key), strict=True)
            row |= {name: round(value, 4) for name, value in ratios}
            row["logprob_rms"] = round(self.distances[key].rms, 5)
            row["logprob_worst"] = round(self.distances[key].worst, 5)
            row["steps_relayed"] = self.counted.get(key, {}).get("steps_relayed", "")
            if self.right:
                row["right"] = self.right[key]
            rows.append(row)
        return rows


# Of a case, unless more are asked for.
MOST_ROUNDS = 15
# Of a round: its prompts and how many tokens each gets.
Round = tuple[Sequence[list[int]], Sequence[int]]


@dataclass(frozen=True)
class Case:
    """One point of a benchmark.

    Attributes:
        columns: what its rows say of it. make_round: of the number of a round, of which number 0
            warms up and is not measured.
        forget: empty the prefix caches before each round: every round computes its prefixes.
        right: of a round's answers, how many are what was asked for; of the last round.
    """

    columns: dict[str, Any]
    make_round: Callable[[int], Round]
    forget: bool = False
    right: Callable[[list[Answer]], int] | None = None

    @property
    def title(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {x}" for name, x in self.columns.items())


def compare(
    engines: dict[str, Engine],
    case: Case,
    repeats: int,
    min_seconds: float = 0,
    report: Callable[[str], None] = lambda doing: None,
) -> Measured:
    """Let the engines, the reference among them, take turns, see `in_turn`.

    Args:
        repeats, min_seconds: see `add_options`.
    """
    measured = Measured()
    before = {key: engine.counters() for key, engine in engines.items()}
    number, spent = 0, 0.0
    while number <= repeats or (spent < min_seconds and number <= MOST_ROUNDS):
        prompts, lengths = case.make_round(number)
        answers = {}
        for key in in_turn(list(engines), number):
            report(f"round {number}: {SYSTEMS[key].label}")
            if not number and not SYSTEMS[key].caching:
                # A batch of that many, but short: it keeps nothing, and would take the longest.
                engines[key].finish([prompt[-64:] for prompt in prompts], lengths)
                continue
            if case.forget:
                engines[key].forget()
                # Pinned system KVs are written again before anything is scheduled: not in our time.
                engines[key].finish([[5]], [1])
            done = engines[key].finish(prompts, lengths)
            answers[key] = done.answers
            measured.tokens = done.tokens
            if number:
                spent += done.seconds
                measured.seconds.setdefault(key, []).append(done.seconds)
                measured.decode_tok_s.setdefault(key, []).append(done.decode_tok_s)
        if case.right:
            measured.right = {key: case.right(found) for key, found in answers.items()}
        for key in answers:
            found = distance(answers[key], answers[REFERENCE])
            before_it = measured.distances.get(key, found)
            measured.distances[key] = max(before_it, found, key=lambda x: (not x.agrees, x.rms))
        number += 1
    for key, engine in engines.items():
        if SYSTEMS[key].relay:
            after = engine.counters()
            measured.counted[key] = {name: after[name] - n for name, n in before[key].items()}
    # in the order that the systems are shown in, whoever went first
    measured.seconds = {key: measured.seconds[key] for key in engines}
    return measured


def measure(
    started: dict[str, Engine], cases: Sequence[Case], args: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """Rows of a CSV, one per case and system.

    Args:
        args: the values of `add_options`.

    Raises:
        WrongAnswers: a system's answers are not the reference's.
    """
    rows = []
    for case in cases:
        with step(console, case.title) as report:
            measured = compare(started, case, args.repeats, args.min_seconds, report)
        if wrong := measured.wrong():
            raise WrongAnswers(f"{case.title}: {'; '.join(wrong)}; no speed is reported")
        rows += measured.rows(**case.columns)
    return rows


@dataclass(frozen=True)
class Comparison:
    """What a script compares.

    Attributes:
        name: of its CSVs. title: of its table, with these columns of the cases. prefixes: token ids
            whose KV `relay-system-kv` loads from files.
    """

    name: str
    title: str
    columns: Sequence[str]
    keys: Sequence[str]
    limits: Limits
    cases: Sequence[Case]
    prefixes: Sequence[Sequence[int]] = ()


def at_least(least: int) -> Callable[[str], int]:
    """Of an option's value, for argparse."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return integer


def add_options(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Options that every comparison of engines has."""
    parser.add_argument(
        "--repeats", type=at_least(1), default=repeats, help="measured rounds per case, at least"
    )
    parser.add_argument(
        "--min-seconds",
        type=float,
        default=0,
        help="more rounds until a case was measured for so long, all systems together; "
        f"{MOST_ROUNDS} at most",
    )
    parser.add_argument("--save", action="store_true", help="write a CSV to benchmarks/results")


def run(comparison: Comparison, model: Path, args: argparse.Namespace) -> int:
    """Start the engines, measure every case, show and keep what was found: a script's status.

    Args:
        args: the values of `add_options`.
    """
    console = make_console()
    keys = comparison.keys
    try:
        with ExitStack() as stack:
            with step(console, f"{len(keys)} engines") as report:
                started = stack.enter_context(
                    engines(
                        model, keys, comparison.limits, prefixes=comparison.prefixes, report=report
                    )
                )
            rows = measure(started, comparison.cases, args, console)
        rows = [{**row, "kv_gib": kv_gib()} for row in rows]
    except WrongAnswers as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    show(console, comparison.title, rows, comparison.columns)
    if args.save:
        save(console, comparison.name, rows)
    return 0


def make_console() -> Console:
    """Without a terminal rich assumes 80 columns; the tables need more."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


# Of the rows that `Measured.rows` makes, in tables of a terminal and of the report.
HEADINGS = (
    "system",
    "seconds",
    "tokens/s",
    "times vLLM",
    "least to most",
    "steps relayed",
    "logprob rms",
)


def cells(row: dict[str, Any]) -> list[str]:
    """Under `HEADINGS`."""
    distance = row["logprob_rms"]
    return [
        SYSTEMS[row["system"]].label,
        f"{row['seconds']:.2f}",
        f"{row['tok_s']:,.0f}",
        f"{row['times_as_fast_as_stock']:.2f}",
        f"{row['times_min']:.2f} to {row['times_max']:.2f}",
        str(row["steps_relayed"]),
        "" if distance == "" else f"{distance:.4f}",
    ]


def show(
    console: Console, title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]
) -> None:
    """Print the rows that `Measured.rows` made; columns: of the cases."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for row in rows:
        table.add_row(
            *(f"{row[x]:,}" if isinstance(row[x], int) else str(row[x]) for x in columns),
            *cells(row),
            end_section=row["system"] == rows[-1]["system"],
        )
    console.print(table)


def save(console: Console, name: str, rows: list[dict[str, Any]]) -> Path:
    """Write a CSV to benchmarks/results, with provenance and the C library's settings."""
    of = provenance() | {name.lower(): value for name, value in HUGE_PAGES.items()}
    path = write_csv(ROOT / "benchmarks" / "results" / f"{name}.csv", rows, of)
    console.print(f"wrote {path.relative_to(ROOT)}")
    return path
