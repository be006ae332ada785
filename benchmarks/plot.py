"""REPORT.md and its figures, from the newest CSV of each benchmark in results/.

    python benchmarks/plot.py [--results FOLDER] [--output FOLDER]

Nothing is measured here: every number and every figure is of a CSV, which is named.
"""

import argparse
import csv
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import bench_attention, bench_decode
from benchmarks.common import ROOT
from vllm_relay.bench.systems import REFERENCE, SYSTEMS

Row = dict[str, Any]
PUBLISHED = Path(__file__).parent / "published.csv"
WIDTH, HEIGHT = 7.0, 4.2
# One colour per system, in every figure.
COLOURS = dict(zip(SYSTEMS, ("0.55", "C0", "C1", "C3", "black", "C1", "C2"), strict=True))


def read(path: Path) -> list[Row]:
    """Rows of a CSV; what looks like a number is one."""

    def value(text: str) -> Any:
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text

    with path.open(newline="") as file:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def newest(results: Path, name: str) -> Path | None:
    """The CSV of a benchmark that was written last; their names end with date and time."""
    found = [x for x in results.glob(f"{name}-*.csv") if x.stem.removeprefix(name)[1:2].isdigit()]
    return max(found, default=None, key=lambda path: path.stem)


def label(key: str) -> str:
    return SYSTEMS[key].label


def axes_of(title: str, x: str, y: str) -> tuple[Any, Any]:
    """A figure with one panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def finish(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot

    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def by_system(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["system"], []).append(row)
    return found


def lines(rows: Sequence[Row], x: str, path: Path, title: str, x_label: str) -> None:
    """Seconds of each system against a column, with the least and the most of the rounds."""
    figure, axes = axes_of(title, x_label, "seconds for all (median; least to most)")
    for key, mine in by_system(rows).items():
        at = [row[x] for row in mine]
        middle = [row["seconds"] for row in mine]
        spread = [
            [row["seconds"] - row["seconds_min"] for row in mine],
            [row["seconds_max"] - row["seconds"] for row in mine],
        ]
        style = ":" if not SYSTEMS[key].attention else "-"
        axes.errorbar(
            at, middle, spread, marker="o", capsize=3, label=label(key), color=COLOURS[key],
            linestyle=style,
        )  # fmt: skip
    finish(figure, axes, path)


def bars(rows: Sequence[Row], x: str, path: Path, title: str, x_label: str) -> None:
    """Times vLLM of each system, in groups by a column."""
    figure, axes = axes_of(title, x_label, "times as fast as vLLM with prefix caching")
    groups = list(dict.fromkeys(row[x] for row in rows))
    of = by_system(rows)
    width = 0.8 / len(of)
    for index, (key, mine) in enumerate(of.items()):
        places = [groups.index(r[x]) + (index - (len(of) - 1) / 2) * width for r in mine]
        middle = [r["times_as_fast_as_stock"] for r in mine]
        spread = [
            [r["times_as_fast_as_stock"] - r["times_min"] for r in mine],
            [r["times_max"] - r["times_as_fast_as_stock"] for r in mine],
        ]
        axes.bar(
            places, middle, width, yerr=spread, capsize=2, label=label(key), color=COLOURS[key]
        )
    axes.set_xticks(
        range(len(groups)), [f"{group:,}" if isinstance(group, int) else group for group in groups]
    )
    axes.axhline(1, color="0.8", linewidth=0.8, zorder=0)
    finish(figure, axes, path)


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """In Markdown."""
    text = f"| {' | '.join(headings)} |\n|{'|'.join(['---:'] * len(headings))}|\n"
    for row in rows:
        text += f"| {' | '.join(map(str, row))} |\n"
    return text


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def cases_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Of what `engines.Measured.rows` wrote."""
    right = any(row.get("right") not in (None, "") for row in rows)
    headings = [*(x.replace("_", " ") for x in columns), "system", "seconds", "tokens/s"]
    headings += ["times vLLM", "least to most", *(["right answers"] if right else [])]
    return table(
        headings,
        (
            [
                *(shown(row[x]) for x in columns),
                label(row["system"]),
                f"{row['seconds']:.2f}",
                f"{row['tok_s']:,.0f}",
                f"{row['times_as_fast_as_stock']:.2f}",
                f"{row['times_min']:.2f} to {row['times_max']:.2f}",
                *([row.get("right", "")] if right else []),
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
    from vllm_relay.cli.bench import summary

    gains = summary(rows)
    figure, axes = axes_of(
        f"Chats under a system prompt of {rows[0]['prompt_tokens']:,} tokens",
        "requests per second (Poisson)",
        "latency over tokens, s (mean; least to most)",
    )
    for key, mine in by_system(row for row in rows if not math.isinf(row["rate"])).items():
        rates = sorted({row["rate"] for row in mine})
        of = [[row["normalized_s"] for row in mine if row["rate"] == rate] for rate in rates]
        middle = [statistics.median(x) for x in of]
        spread = [
            [m - min(x) for m, x in zip(middle, of, strict=True)],
            [max(x) - m for m, x in zip(middle, of, strict=True)],
        ]
        axes.errorbar(
            rates, middle, spread, marker="o", capsize=3, label=label(key), color=COLOURS[key]
        )
    finish(figure, axes, path)
    return table(
        ["requests/s", "system", "tokens/s", "TTFT p50", "TPOT p50", "s/token", "times vLLM"],
        (
            [
                "all at once" if math.isinf(gain["rate"]) else f"{gain['rate']:g}",
                label(gain["system"]),
                f"{gain['tokens_per_s']:,.0f}",
                f"{gain['ttft_p50_s']:.3f} s",
                f"{1e3 * gain['tpot_p50_s']:.1f} ms",
                f"{gain['normalized_s']:.4f}",
                f"{gain['times_latency']:.2f}",
            ]
            for gain in gains
        ),
    )


def attention(rows: list[Row], path: Path) -> str:
    bench_attention.plot(rows, path)
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


def decode(rows: list[Row], path: Path) -> str:
    bench_decode.plot(rows, path)
    return table(
        ["shared tokens", "vLLM, tokens/s", "relay, tokens/s", "times", "least to most"],
        (
            [
                f"{row['shared_tokens']:,}",
                f"{row['stock_tok_s']:,.0f}",
                f"{row['relay_tok_s']:,.0f}",
                f"{row['ratio']:.2f}",
                f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}",
            ]
            for row in rows
        ),
    )


@dataclass(frozen=True)
class Section:
    """Of the report: the benchmark's name, what is asked, and how rows become figure and table."""

    name: str
    title: str
    text: str
    draw: Callable[[list[Row], Path], str]


SECTIONS = (
    Section(
        "serving", "Interactive serving",
        "Real servers side by side, `vllm bench serve` as the client. Latency over tokens is the "
        "RelayAttention paper's normalized latency.",
        serving,
    ),
    Section(
        "throughput", "Non-interactive throughput",
        "All requests at once, by the length of the system prompt.", throughput,
    ),
    Section(
        "fewshot", "Few-shot prompts of many subjects",
        "As table 3 of the RelayAttention paper: subjects share their examples, by how many there "
        "are.",
        fewshot,
    ),
    Section(
        "needles", "Questions about one document",
        "As Hydragen's document task; without attention nobody can answer, which is the ceiling.",
        needles,
    ),
    Section(
        "tree", "One level of sharing and two",
        "Examples for all, problems for some, samples of each problem.", tree,
    ),
    Section(
        "attention", "Attention of one layer",
        "Kernels beside what the machine can do at most, on one thread.", attention,
    ),
    Section(
        "decode", "Decode steps",
        "Two engines in turns; the dotted line is the arithmetic that no kernel can leave out.",
        decode,
    ),
)  # fmt: skip


def does_not_help(found: dict[str, list[Row]]) -> str:
    """Where relay is within 5 % of vLLM with prefix caching, or slower, in any of the CSVs."""
    cases: list[list[str]] = []
    for name, rows in found.items():
        if name in ("throughput", "fewshot", "needles", "tree"):
            skip = {"system", "rounds", "tokens", "tok_s", "logprob_rms", "steps_relayed", "right"}
            for row in rows:
                ratio = row["times_as_fast_as_stock"]
                if SYSTEMS[row["system"]].relay and ratio < 1.05:
                    case = list(row)[: list(row).index("system")]
                    what = ", ".join(
                        f"{x.replace('_', ' ')} {shown(row[x])}" for x in case if x not in skip
                    )
                    cases.append([name, what, label(row["system"]), f"{ratio:.2f}"])
        elif name == "decode":
            cases += [
                [name, f"{row['shared_tokens']:,} tokens shared", "relay", f"{row['ratio']:.2f}"]
                for row in rows
                if row["ratio"] < 1.05
            ]
        elif name == "serving":
            from vllm_relay.cli.bench import summary

            cases += [
                [name, f"{gain['rate']:g} requests/s", label(gain["system"]),
                 f"{gain['times_latency']:.2f}"]
                for gain in summary(rows)
                if SYSTEMS[gain["system"]].relay and gain["times_latency"] < 1.05
            ]  # fmt: skip
    if not cases:
        return "In none of the cases measured here.\n"
    return table(["benchmark", "case", "system", f"times {SYSTEMS[REFERENCE].label}"], cases)


def published() -> str:
    """The authors' own figures, beside the theory: eq. 10 of the RelayAttention paper."""
    rows = read(PUBLISHED)

    def theory(row: Row) -> float:
        s, c, b = row["prefix_tokens"], row["context_tokens"], row["requests"]
        return (s + c + 2) / (s / b + c + 7)

    return table(
        ["prefix tokens", "PagedAttention, us", "RelayAttention, us", "times", "eq. 10"],
        (
            [
                f"{row['prefix_tokens']:,}",
                f"{row['stock_us']:,.0f}",
                f"{row['relay_us']:,.0f}",
                f"{row['stock_us'] / row['relay_us']:.2f}",
                f"{theory(row):.2f}",
            ]
            for row in rows
        ),
    ) + (
        f"\nAttention of one layer, {rows[0]['requests']} requests with "
        f"{rows[0]['context_tokens']} tokens of context each, on an {rows[0]['hardware']}: the "
        f"authors' data ({rows[0]['source']}).\n"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args(argv)
    sections, found = "", {}
    for section in SECTIONS:
        path = newest(args.results, section.name)
        if path is None:
            continue
        rows = found[section.name] = read(path)
        figure = path.with_suffix(".png")
        text = section.draw(rows, figure)
        row = rows[0]
        sections += f"## {section.title}\n\n{section.text}\n\n"
        sections += f"![{section.title}]({relative(figure, args.output)})\n\n{text}\n"
        sections += (
            f"`{row['command']}`, on {str(row['date'])[:10]}: {row['device']}, {row['cores']} "
            f"cores, vLLM {row['vllm']}, PyTorch {row['torch']}, revision {row['revision']} "
            f"([CSV]({relative(path, args.output)})).\n\n"
        )
    if not found:
        print(f"no CSV of a benchmark in {args.results}")
        return 1
    report = args.output / "REPORT.md"
    report.write_text(
        "# What relay brings, and where it does not help\n\n"
        "Made by `python benchmarks/plot.py` from the CSVs in `results/`, the newest of each "
        "benchmark; `make bench` measures them anew. Systems take turns on the same prompts in "
        "one run; ratios are medians of pairs, and no speed is shown unless the answers agree.\n\n"
        "## Where it does not help\n\n"
        "All cases in which relay is not at least 1.05 times as fast as vLLM with prefix "
        f"caching:\n\n{does_not_help(found)}\n{sections}"
        f"## The paper's own figures\n\n{published()}"
    )
    print(f"wrote {report.relative_to(ROOT) if report.is_relative_to(ROOT) else report}")
    return 0


def relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


if __name__ == "__main__":
    sys.exit(main())
