"""Interleaved comparison of engines: rounds in Latin-square order, checked answers, CSV rows."""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.engines import Engine, Limits, engines
from benchmarks.harness.environment import HUGE_PAGES, kv_gib, model_dtype
from benchmarks.harness.result_csv import Row, save
from benchmarks.harness.terminal import add_eager, add_save, at_least, make_console, step
from vllm_relay.serving.agreement import Answer, Distance, WrongAnswers, distance
from vllm_relay.serving.comparison import interleaved
from vllm_relay.serving.systems import REFERENCE, SYSTEMS

# Rounds per workload at most, unless --repeats asks for more.
MOST_ROUNDS = 15
# Prompts of a round (token ids) and the number of tokens to generate for each.
Round = tuple[Sequence[list[int]], Sequence[int]]


@dataclass
class Measured:
    """Times of one workload per system, over rounds in which all had the same prompts.

    Attributes:
        seconds, prefill_seconds, decode_tok_s: system -> a value per round. tokens: of a round.
        distances: system -> distance from the baseline's answers, the largest of all rounds.
        counted: relay system -> its counters over the rounds, see `vllm_relay.metrics.counters`.
        right: system -> right answers, of `asked` prompts. parted: system -> answers that part from
        the baseline's. lead: system -> the largest `Distance.lead`.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    prefill_seconds: dict[str, list[float]] = field(default_factory=dict)
    decode_tok_s: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    distances: dict[str, Distance] = field(default_factory=dict)
    counted: dict[str, dict[str, float]] = field(default_factory=dict)
    right: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    parted: Counter[str] = field(default_factory=Counter)
    lead: dict[str, float] = field(default_factory=dict)

    def speed_up(self, key: str) -> tuple[float, float, float]:
        """Speed-up of a system over the baseline: median, minimum and maximum of the rounds."""
        ratios = [a / b for a, b in zip(self.seconds[REFERENCE], self.seconds[key], strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)

    def wrong(self) -> list[str]:
        """Failures of the answer check, as text; with any of them no speed is reported.

        Systems that attend must answer as the baseline. The system that skips attention is the
        negative control: if its answers pass, the check detects nothing.
        """
        return [
            f"{SYSTEMS[key].label}: {found}"
            + ("" if SYSTEMS[key].attention else ": the check does not detect missing attention")
            for key, found in self.distances.items()
            if found.agrees != SYSTEMS[key].attention
        ]

    def rows(self, **columns: Any) -> list[Row]:
        """CSV rows, one per system, that begin with these columns."""
        rows = []
        for key, taken in self.seconds.items():
            median = statistics.median(taken)
            times, times_min, times_max = self.speed_up(key)
            row = dict(  # a column of the workload under one of these names is an error
                **columns,
                system=key,
                rounds=len(taken),
                tokens=self.tokens,
                seconds=round(median, 4),
                seconds_min=round(min(taken), 4),
                seconds_max=round(max(taken), 4),
                tok_s=round(self.tokens / median, 2),
                times_as_fast_as_stock=round(times, 4),
                times_min=round(times_min, 4),
                times_max=round(times_max, 4),
                logprob_rms=round(self.distances[key].rms, 5),
                logprob_worst=round(self.distances[key].worst, 5),
                steps_relayed=self.counted.get(key, {}).get("steps_relayed", ""),
            )
            if self.asked:
                row |= {"right": self.right[key], "asked": self.asked, "parted": self.parted[key]}
                row["parted_lead"] = round(self.lead.get(key, 0.0), 5)
            rows.append(row)
        return rows


@dataclass(frozen=True)
class Workload:
    """One point of a benchmark's grid.

    Attributes:
        columns: CSV columns that describe it. make_round: round number -> its prompts; round 0
            warms up and is not measured. forget: empty the prefix caches before each round.
        right: round number and its answers -> how many are right. relays: relay must relay steps.
        temperature: of the measured rounds. Above 0 systems draw other tokens, so round 0, which is
        greedy, is the one whose answers are compared.
    """

    columns: dict[str, Any]
    make_round: Callable[[int], Round]
    forget: bool = False
    right: Callable[[int, list[Answer]], int] | None = None
    relays: bool = False
    temperature: float = 0.0

    @property
    def title(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {x}" for name, x in self.columns.items())


@dataclass(frozen=True)
class Comparison:
    """Systems and workloads of a suite.

    Attributes:
        name: of its CSVs. title: of its table. columns: workload columns in the table.
        keys: systems. prefixes: token ids whose KV `relay-system-kv` loads from files.
    """

    name: str
    title: str
    columns: Sequence[str]
    keys: Sequence[str]
    limits: Limits
    workloads: Sequence[Workload]
    prefixes: Sequence[Sequence[int]] = ()


def compare(
    engines: dict[str, Engine],
    workload: Workload,
    repeats: int,
    min_seconds: float = 0,
    report: Callable[[str], None] = lambda doing: None,
) -> Measured:
    """Runs a workload on interleaved engines, the baseline among them, see `interleaved`.

    Args:
        repeats, min_seconds: see `add_options`.
    """
    measured = Measured()
    before = {key: engine.counters() for key, engine in engines.items()}
    number, spent = 0, 0.0
    while number <= repeats or (spent < min_seconds and number <= MOST_ROUNDS):
        prompts, lengths = workload.make_round(number)
        answers = {}
        for key in interleaved(list(engines), number):
            report(f"round {number}: {SYSTEMS[key].label}")
            if not number and not SYSTEMS[key].caching and not workload.temperature:
                # The batch size warms it up; without a cache the full prompts would be for nothing.
                engines[key].finish([prompt[-64:] for prompt in prompts], lengths)
                continue
            if workload.forget:
                engines[key].forget()
                # Pinned system KV is rewritten before the next schedule: outside the timing.
                engines[key].finish([[5]], [1])
            done = engines[key].finish(prompts, lengths, workload.temperature if number else 0)
            answers[key] = done.answers
            measured.tokens = done.tokens
            if number:
                spent += done.seconds
                measured.seconds.setdefault(key, []).append(done.seconds)
                measured.prefill_seconds.setdefault(key, []).append(done.prefill_seconds)
                measured.decode_tok_s.setdefault(key, []).append(done.decode_tok_s)
        if workload.right and number:
            measured.asked += len(prompts)
            measured.right.update({k: workload.right(number, x) for k, x in answers.items()})
        for key in answers if not (number and workload.temperature) else ():
            found = distance(answers[key], answers[REFERENCE])
            if number:
                measured.parted[key] += found.parted
                measured.lead[key] = max(measured.lead.get(key, 0.0), found.lead)
            previous = measured.distances.get(key, found)
            measured.distances[key] = max(previous, found, key=lambda x: (not x.agrees, x.rms))
        number += 1
    for key, engine in engines.items():
        if SYSTEMS[key].relay:
            after = engine.counters()
            measured.counted[key] = {name: after[name] - n for name, n in before[key].items()}
    # in the order of the tables, whichever engine went first
    measured.seconds = {key: measured.seconds[key] for key in engines}
    return measured


def add_options(parser: argparse.ArgumentParser, repeats: int, keys: Sequence[str] = ()) -> None:
    """Adds the options of every comparison of engines; ``keys``: systems that `run` compares."""
    if keys:
        others = [key for key in keys if key != REFERENCE]
        parser.add_argument(
            "--without", nargs="+", choices=others, default=[], help="systems to leave out"
        )
    parser.add_argument(
        "--repeats", type=at_least(1), default=repeats, help="measured rounds per workload"
    )
    parser.add_argument(
        "--min-seconds",
        type=float,
        default=0,
        help="add rounds until all systems together took this long per workload; "
        f"at most {MOST_ROUNDS} rounds",
    )
    add_eager(parser)
    add_save(parser)


def run(comparison: Comparison, model: Path, args: argparse.Namespace) -> int:
    """Starts the engines, measures, prints and saves; returns the script's exit status.

    Args:
        args: values of `add_options`.
    """
    console = make_console()
    rows: list[Row] = []
    keys = [key for key in comparison.keys if key not in args.without]
    with ExitStack() as stack:
        with step(console, f"{len(keys)} engines") as report:
            started = stack.enter_context(
                engines(
                    model,
                    keys,
                    comparison.limits,
                    prefixes=comparison.prefixes,
                    report=report,
                )
            )
        try:
            for workload in comparison.workloads:
                measured = checked(started, workload, args, console)
                rows += measured.rows(**workload.columns)
        except WrongAnswers as error:
            console.print(str(error), style="red", markup=False, soft_wrap=True)
            return 1
    rows = [{**row, "kv_gib": kv_gib()} for row in rows]
    show(console, comparison.title, rows, comparison.columns)
    if args.save:
        save_engines(console, comparison.name, rows, args.eager)
    return 0


def checked(
    started: dict[str, Engine], workload: Workload, args: argparse.Namespace, console: Console
) -> Measured:
    """Measures a workload and checks its answers.

    Raises:
        WrongAnswers: a system's answers are not the baseline's.
    """
    with step(console, workload.title) as report:
        measured = compare(started, workload, args.repeats, args.min_seconds, report)
    if wrong := measured.wrong():
        raise WrongAnswers(f"{workload.title}: {'; '.join(wrong)}; no speed is reported")
    idle = [key for key, counted in measured.counted.items() if not counted["steps_relayed"]]
    if workload.relays and idle:
        raise WrongAnswers(f"{workload.title}: {SYSTEMS[idle[0]].label} relayed no step")
    return measured


def save_engines(
    console: Console, name: str, rows: Sequence[Row], eager: bool, dtype: str | None = None
) -> Path:
    """Writes a CSV with provenance, the mode and the memory settings of the engines.

    Args:
        dtype: vLLM's ``--dtype`` of the engines; None: `model_dtype`. "auto" is not said.
    """
    memory = {key.lower(): value for key, value in HUGE_PAGES.items()}
    mode, dtype = "eager" if eager else "compiled", dtype or model_dtype()
    mode += "" if dtype == "auto" else f", {dtype}"
    return save(console, name, rows, mode=mode, **memory)


# Columns of `Measured.rows` in tables of the terminal and of the report.
HEADINGS = (
    *("system", "seconds", "tokens/s", "times vLLM", "least to most", "steps relayed"),
    "logprob rms",
)


def cells(row: Row) -> list[str]:
    """One table row, under `HEADINGS`."""
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


def show(console: Console, title: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Prints rows of `Measured.rows` with these columns of the workloads."""
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
