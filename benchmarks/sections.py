"""The report's sections: how the rows of each benchmark become a figure, a table and ratios."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import attention_figures, turns
from benchmarks.ceilings import theoretical_speed_up
from benchmarks.figures import (
    COLOURS,
    axes_of,
    bars,
    by_system,
    finish,
    label,
    lines,
    medians,
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
                *(f"{row[x]} of {row['questions']}" for x in right),
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
        middle, bounds = medians(of)
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
    text += f"\n{gains.legend(rows)} Who needs twice the bound is not asked for higher rates.\n"
    held = [f"- {line}" for line in gains.held_lines(rows, row["bound_s"])]
    if held:
        seconds = statistics.median(row["requests"] / row["rate"] for row in swept)
        text += (
            f"\nThe highest rate of the sweep, each kept up for about {seconds:.0f} s, up to which "
            "latency over tokens stays\n\n"
        )
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
        [
            "heads",
            "of",
            "tokens",
            "way",
            "ms",
            "GFLOP/s",
            "GB/s",
            "of the matrix product",
            "of reading",
        ],
        (
            [
                f"{row['query_heads']}/{row['kv_heads']} x {row['head_size']}",
                row["part"],
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


# Columns that eq. 10 is of.
STEP = ("requests", "prefix_tokens", "context_tokens")


def theory(rows: list[Row], path: Path) -> str:
    attention_figures.theory(rows, path)
    return table(
        ["prefix tokens", "caches", "vLLM, ms", "our kernels, nothing shared, ms", "relay, ms",
         "times vLLM", "least to most", "by sharing", "eq. 10"],
        (
            [
                f"{row['prefix_tokens']:,}",
                row["caches"],
                f"{row['stock_ms']:.2f}",
                f"{row['unshared_ms']:.2f}",
                f"{row['ms']:.2f}",
                f"{row['times_as_fast_as_vllm']:.2f}",
                f"{row['times_min']:.2f} to {row['times_max']:.2f}",
                f"{row['by_sharing']:.2f}",
                f"{theoretical_speed_up(*(row[x] for x in STEP)):.2f}",
            ]
            for row in rows
        ),
    )  # fmt: skip


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
    """A step by the length of the prefix, and the least that attention to the prefix adds."""
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
    least = [x["no_attention_step_ms"] + x["prefix_ms_at_gemm_rate"] for x in swept]
    axes.plot(
        lengths, least, color="black", linestyle=":",
        label="… and the prefix as a matrix product",
    )  # fmt: skip
    finish(figure, axes, path)
    return table(
        ["requests", "shared tokens", "own tokens", "vLLM, tokens/s", "relay, tokens/s",
         "no attention, tokens/s", "times vLLM", "least to most", "steps relayed", "logprob rms"],
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
                row["steps_relayed"],
                f"{row['logprob_rms']:.4f}",
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


def system_kv(rows: list[Row], path: Path) -> str:
    """Time to the first token with and without a file, and what loading it costs."""
    timed = [row for row in rows if row["ttft_s"] != ""]
    cases = list(dict.fromkeys(row["what"] for row in timed))
    of = {
        (what, file): [r["ttft_s"] for r in timed if (r["what"], r["file"]) == (what, file)]
        for what in cases
        for file in ("without", "with")
    }
    tokens = timed[0]["tokens"]
    figure, axes = axes_of(
        f"A system prompt of {tokens:,} tokens",
        "",
        "time to first token, s (median; least to most)",
    )
    for place, file in enumerate(("without", "with")):
        middle, bounds = medians([of[what, file] for what in cases])
        places = [i + 0.4 * place - 0.2 for i in range(len(cases))]
        axes.bar(places, middle, 0.4, yerr=bounds, capsize=3, label=f"{file} the file")
    axes.set_xticks(range(len(cases)), cases)
    finish(figure, axes, path)
    text = table(
        ["time to first token", "without the file", "with it", "ratio"],
        (
            [what, f"{without:.2f} s", f"{with_it:.2f} s", f"{with_it / without:.3f}"]
            for what in cases
            for without, with_it in [[statistics.median(of[what, x]) for x in ("without", "with")]]
        ),
    )
    loads = [row for row in rows if row["gb_per_s"] != ""]
    return f"{text}\n" + table(
        ["a file on one core", "MB", "GB/s"],
        (
            [what, f"{mine[0]['mb']:,.0f}", f"{statistics.median(r['gb_per_s'] for r in mine):.1f}"]
            for what in dict.fromkeys(row["what"] for row in loads)
            for mine in [[row for row in loads if row["what"] == what]]
        ),
    )


SECTIONS = (
    Section(
        "serving", "Interactive serving",
        "Chats under one system prompt: real servers side by side, `vllm bench serve` as the "
        "client. Latency over tokens is the RelayAttention paper's normalized latency. Where few "
        "requests run at once nothing is relayed, and a ratio is the machine's noise.",
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
        "system-kv", "Starting with the system prompt in the cache",
        "`vllm serve` with relay, started with a KV file of the system prompt and without one: the "
        "first request after a start, and one more after other prompts went round the whole KV "
        "cache. `make bench` does not measure it.",
        system_kv, lambda rows: [],
    ),
    Section(
        "throughput", "Non-interactive throughput",
        "All requests at once, by the length of the system prompt. Relayed steps are those that "
        "the cost model chose; where there are none, relay runs vLLM's own attention, and a ratio "
        "is the machine's noise.",
        throughput, case_ratios,
    ),
    Section(
        "fewshot", "Few-shot prompts of many subjects",
        "In shape as table 3 of the RelayAttention paper: the questions on a subject share its "
        "examples. Prefix caches are emptied before every round; KV files, of all that is shared, "
        "are made beforehand, which is not in the time. Without examples no file holds anything.",
        fewshot, case_ratios,
    ),
    Section(
        "needles", "Questions about one document",
        "As Hydragen's document task: facts are planted in a text, and sentences are to be ended "
        "with them; `right` counts the answers that name the word. Without attention none is; its "
        "time is the least that any attention kernel could reach.",
        needles, case_ratios,
    ),
    Section(
        "tree", "One level of sharing and two",
        "Examples for all, problems for some, samples of each problem.", tree, case_ratios,
    ),
    Section(
        "decode", "Decode steps",
        "Engines in turns. The lines below are of an engine that skips attention, and of one that "
        "would attend to the prefix, and to nothing else, at the rate of a matrix product: what is "
        "between them and relay is all that is left to gain. Steps that nothing is shared in run "
        "vLLM's own attention; relayed ones attend to contexts with our kernel, which is faster "
        "than vLLM's: where prefixes are short or contexts long, part of the gain is that (see the "
        "next two sections).",
        decode, decode_ratios, "", lambda row: "no_attention_step_ms" in row,
    ),
    Section(
        "attention", "Attention of a whole step, and the theory",
        "vLLM's attention and relay's on the same step, always relayed, with caches flushed before "
        "every call or warm from the same call; packed copies of the prefix are made already. With "
        "short prefixes part of the gain is that our kernels are faster than vLLM's: `by sharing` "
        "is against our own kernels with nothing shared, and that is what eq. 10 of the "
        "RelayAttention paper predicts. It counts reads of memory and nothing else; where "
        "arithmetic takes the time, as with long prefixes on a CPU, less can be had.",
        theory, theory_ratios, "-theory",
        lambda row: row.get("part") == "step" and "unshared_ms" in row,
    ),
    Section(
        "attention", "Attention of one layer",
        "Kernels beside what the machine can do at most, on one thread: one prefix for all "
        "requests, or contexts that each has for itself.", attention,
        lambda rows: [], "", lambda row: row.get("part") != "step" and "ms_min" in row,
    ),
)  # fmt: skip
