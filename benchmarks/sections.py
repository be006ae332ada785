"""The report's sections: how the rows of each benchmark become a figure, a table and ratios."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import attention_figures, turns
from benchmarks.figures import (
    COLOURS,
    axes_of,
    bars,
    by_system,
    finish,
    label,
    lines,
    spread,
)
from benchmarks.reading import Row
from vllm_relay.bench import gains
from vllm_relay.bench.systems import SYSTEMS


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


@dataclass(frozen=True)
class Section:
    """Of the report.

    Attributes:
        name: of the benchmark's CSVs. suffix: of this figure's file. text: what is asked. draw:
            makes the figure and returns the table. ratios: of the same rows. of: rows that it is
            made of; without any there is no section.
    """

    name: str
    title: str
    text: str
    draw: Callable[[list[Row], Path], str]
    ratios: Callable[[list[Row]], list[Ratio]]
    suffix: str = ""
    of: Callable[[Row], bool] = lambda row: True


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """In Markdown."""
    text = f"| {' | '.join(headings)} |\n|{'|'.join(['---:'] * len(headings))}|\n"
    for row in rows:
        text += f"| {' | '.join(map(str, row))} |\n"
    return text


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


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


# Columns of `turns.Measured.rows`, which follow those of the case.
MEASURED = "system"


def case_ratios(rows: list[Row]) -> list[Ratio]:
    """Of what `turns.Measured.rows` wrote."""
    return [
        Ratio(
            ", ".join(
                f"{name.replace('_', ' ')} {shown(row[name])}"
                for name in list(row)[: list(row).index(MEASURED)]
            ),
            kind_of(row),
            label(row["system"]),
            row["times_as_fast_as_stock"],
            row["times_min"],
            row["times_max"],
        )
        for row in rows
        if SYSTEMS[row["system"]].relay
    ]


def cases_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Of what `turns.Measured.rows` wrote."""
    right = ["right"] if any(row.get("right") not in (None, "") for row in rows) else []
    return table(
        [*(x.replace("_", " ") for x in columns), *turns.HEADINGS, *right],
        (
            [
                *(shown(row[x]) for x in columns),
                *turns.cells(row),
                *(row[x] for x in right),
            ]
            for row in rows
        ),
    )


def throughput(rows: list[Row], path: Path) -> str:
    plain = [row for row in rows if row["lengths"] == "conversations"]
    bars(
        plain, "prefix_tokens", path,
        f"{plain[0]['requests']} requests at once, lengths of conversations",
        "tokens of the system prompt",
    )  # fmt: skip
    return cases_table(rows, ("prefix_tokens", "lengths"))


def fewshot(rows: list[Row], path: Path) -> str:
    lines(
        rows, "examples", path,
        f"{rows[0]['subjects']} subjects x {rows[0]['questions']} questions, caches empty",
        "examples before each question",
    )  # fmt: skip
    return cases_table(rows, ("examples", "shared_tokens"))


def needles(rows: list[Row], path: Path) -> str:
    lines(
        rows, "questions", path,
        f"Questions about one document of {rows[0]['document_tokens']:,} tokens",
        "questions at once",
    )  # fmt: skip
    return cases_table(rows, ("questions",))


def tree(rows: list[Row], path: Path) -> str:
    row = rows[0]
    bars(
        rows, "problem_tokens", path,
        f"{row['examples_tokens']:,} tokens for all, {row['problems']} problems, "
        f"{row['samples']} samples of each",
        "tokens of each problem",
    )  # fmt: skip
    return cases_table(rows, ("problem_tokens",))


def serving(rows: list[Row], path: Path) -> str:
    row = rows[0]
    title = f"{row['dataset']}: a prefix of {row['prefix_tokens']:,} tokens"
    what = "latency over tokens, s (mean; least to most)"
    swept = [x for x in rows if not math.isinf(x["rate"])]
    figure, axes = axes_of(title, "requests per second (Poisson)" if swept else "", what)
    for place, (key, mine) in enumerate(by_system(swept or rows).items()):
        rates = sorted({row["rate"] for row in mine})
        of = [[row["normalized_s"] for row in mine if row["rate"] == rate] for rate in rates]
        middle = [statistics.median(x) for x in of]
        bounds = [
            [m - min(x) for m, x in zip(middle, of, strict=True)],
            [max(x) - m for m, x in zip(middle, of, strict=True)],
        ]
        style = {"capsize": 3, "label": label(key), "color": COLOURS[key]}
        if swept:
            axes.errorbar(rates, middle, bounds, marker="o", **style)
        else:  # all at once
            axes.bar([place], middle, yerr=bounds, **style)
            axes.set_xticks([])
    if swept:
        axes.set_xticks(sorted({row["rate"] for row in swept}))
        axes.axhline(row["bound_s"], color="0.8", linewidth=0.8, zorder=0)
    finish(figure, axes, path, log=bool(swept))
    text = table(gains.HEADINGS, map(gains.cells, gains.summary(rows)))
    text += (
        f"\nEach server has {row['kv_gib']} GiB for KV: without prefix caching every request fills "
        "its own part of them, and those for whom there is no room wait.\n"
    )
    held = [f"- {line}" for line in gains.held_lines(rows, row["bound_s"])]
    if held:
        text += "\nThe highest rate of the sweep up to which latency over tokens stays\n\n"
    return text + "\n".join([*held, ""])


def serving_ratios(rows: list[Row]) -> list[Ratio]:
    return [
        Ratio(
            "all at once" if math.isinf(gain["rate"]) else f"{gain['rate']:g} requests/s",
            "",
            label(gain["system"]),
            gain["times_latency"],
            gain["times_latency_min"],
            gain["times_latency_max"],
        )
        for gain in gains.summary(rows)
        if SYSTEMS[gain["system"]].relay
    ]


def attention(rows: list[Row], path: Path) -> str:
    attention_figures.kernels(rows, path)
    least = min(row["threads"] for row in rows)
    return table(
        ["heads", "case", "way", "ms", "GFLOP/s", "GB/s", "of the matrix product", "of reading"],
        (
            [
                f"{row['query_heads']}/{row['kv_heads']} x {row['head_size']}",
                row["case"],
                row["way"],
                f"{row['ms']:.2f}",
                f"{row['gflop_s']:.0f}",
                f"{row['gb_s']:.1f}",
                f"{row['of_gemm']:.0%}",
                f"{row['of_read']:.0%}",
            ]
            for row in rows
            if row["threads"] == least
        ),
    )


def theory(rows: list[Row], path: Path) -> str:
    attention_figures.theory(rows, path)
    return table(
        ["prefix tokens", "caches", "vLLM, ms", "relay, ms", "times", "least to most", "eq. 10"],
        (
            [
                f"{row['prefix_tokens']:,}",
                row["caches"],
                f"{row['stock_ms']:.2f}",
                f"{row['ms']:.2f}",
                f"{row['times_as_fast_as_vllm']:.2f}",
                f"{row['times_min']:.2f} to {row['times_max']:.2f}",
                f"{row['eq_10']:.2f}",
            ]
            for row in rows
        ),
    )


def theory_ratios(rows: list[Row]) -> list[Ratio]:
    return [
        Ratio(
            f"{row['requests']} requests, {row['prefix_tokens']:,} shared, "
            f"{row['context_tokens']} own, caches {row['caches']}",
            kind_of(row),
            "relay, always",
            row["times_as_fast_as_vllm"],
            row["times_min"],
            row["times_max"],
        )
        for row in rows
    ]


def decode(rows: list[Row], path: Path) -> str:
    """A step by the length of the prefix, and the least that the prefix's arithmetic adds."""
    usual = (rows[0]["requests"], rows[0]["own_tokens"])
    swept = [row for row in rows if (row["requests"], row["own_tokens"]) == usual]
    swept.sort(key=lambda row: row["shared_tokens"])
    lengths = [row["shared_tokens"] for row in swept]
    row = swept[0]
    figure, axes = axes_of(
        f"{row['requests']} requests with {row['own_tokens']} tokens each, {row['layers']} layers, "
        f"{row['query_heads']}/{row['kv_heads']} heads of {row['head_size']}",
        "tokens of the shared prefix",
        "milliseconds per decode step (median; least to most)",
    )
    for key in ("stock", "relay"):
        name = f"{key}_step_ms"
        axes.errorbar(
            lengths,
            [row[name] for row in swept],
            spread(swept, name, f"{name}_min", f"{name}_max"),
            marker="o",
            capsize=3,
            label=label(key),
            color=COLOURS[key],
        )
    bare = [row["no_attention_step_ms"] for row in swept]
    axes.plot(lengths, bare, color="0.6", linestyle="--", label=label("no-attention"))
    least = [
        row["relay_step_ms"] + x["prefix_ms_at_gemm_rate"] - row["prefix_ms_at_gemm_rate"]
        for x in swept
    ]
    axes.plot(
        lengths, least, color="black", linestyle=":",
        label="the shortest step, and the prefix's arithmetic\nat the rate of a matrix product",
    )  # fmt: skip
    finish(figure, axes, path)
    return table(
        ["requests", "shared tokens", "own tokens", "vLLM, tokens/s", "relay, tokens/s",
         "no attention, tokens/s", "times vLLM", "least to most"],
        (
            [
                row["requests"],
                f"{row['shared_tokens']:,}",
                f"{row['own_tokens']:,}",
                f"{row['stock_tok_s']:,.1f}",
                f"{row['relay_tok_s']:,.1f}",
                f"{row['no_attention_tok_s']:,.1f}",
                f"{row['ratio']:.2f}",
                f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}",
            ]
            for row in rows
        ),
    )  # fmt: skip


def decode_ratios(rows: list[Row]) -> list[Ratio]:
    return [
        Ratio(
            f"requests {row['requests']}, shared tokens {row['shared_tokens']:,}, own tokens "
            f"{row['own_tokens']:,}",
            kind_of(row),
            "relay",
            row["ratio"],
            row["ratio_min"],
            row["ratio_max"],
        )
        for row in rows
    ]


SECTIONS = (
    Section(
        "serving", "Interactive serving",
        "Chats under one system prompt: real servers side by side, `vllm bench serve` as the "
        "client. Latency over tokens is the RelayAttention paper's normalized latency.",
        serving, serving_ratios,
    ),
    Section(
        "serving-prefix_repetition", "Interactive serving of repeated prefixes",
        "The client's `prefix_repetition` dataset: prefixes are new in every round, so that what "
        "they cost once is in it.",
        serving, serving_ratios,
    ),
    Section(
        "serving-random", "Interactive serving of random prompts",
        "The client's `random` dataset with a prefix, new in every round.",
        serving, serving_ratios,
    ),
    Section(
        "throughput", "Non-interactive throughput",
        "All requests at once, by the length of the system prompt.", throughput, case_ratios,
    ),
    Section(
        "fewshot", "Few-shot prompts of many subjects",
        "As table 3 of the RelayAttention paper: subjects share their examples, by how many there "
        "are.",
        fewshot, case_ratios,
    ),
    Section(
        "needles", "Questions about one document",
        "As Hydragen's document task; without attention nobody can answer, which is the ceiling.",
        needles, case_ratios,
    ),
    Section(
        "tree", "One level of sharing and two",
        "Examples for all, problems for some, samples of each problem.", tree, case_ratios,
    ),
    Section(
        "decode", "Decode steps",
        "Engines in turns; the dotted line is the arithmetic that no kernel can leave out.",
        decode, decode_ratios, "", lambda row: "no_attention_step_ms" in row,
    ),
    Section(
        "attention", "Attention of a whole step, and the theory",
        "vLLM's attention and relay's on the same step, always relayed, with caches flushed before "
        "every call or warm from the same call. Eq. 10 of the RelayAttention paper counts reads of "
        "memory and nothing else; where arithmetic takes the time, as on a CPU, less can be had.",
        theory, theory_ratios, "-theory", lambda row: row.get("part") == "step",
    ),
    Section(
        "attention", "Attention of one layer",
        "Kernels beside what the machine can do at most, on one thread.", attention,
        lambda rows: [], "", lambda row: row.get("part") != "step" and "ms_min" in row,
    ),
)  # fmt: skip
