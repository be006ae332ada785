"""Figures, tables and speed-ups of the suites that compare systems."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import latin_square
from benchmarks.harness.result_csv import Row
from benchmarks.report.figure_style import axes_of, bars, finish, label, lines, medians
from benchmarks.report.markdown import Ratio, kind_of, shown, table
from vllm_relay.serving.systems import REFERENCE, SYSTEMS

# Columns of `latin_square.Measured.rows`, which follow those of the case.
MEASURED = "system"


def case_ratios(rows: list[Row]) -> list[Ratio]:
    """Speed-ups in rows of `latin_square.Measured.rows`."""
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


def _scores(row: Row) -> list[str]:
    """Right answers, and of those that part from the baseline's the number and the largest lead.

    Older rows have less.
    """
    asked = row.get("asked") or row["questions"]
    parted = [shown(row.get(name, "")) for name in ("parted", "parted_lead")]
    return [f"{row['right']:,} of {asked:,}", *parted]


def scored(rows: Sequence[Row]) -> bool:
    """Whether right answers were counted, which older CSVs do not say."""
    return all(row.get("right") not in (None, "") for row in rows)


def accuracy(rows: Sequence[Row]) -> str:
    """Sentence on the largest difference of right answers, in binomial errors."""
    if not scored(rows):
        return ""
    of_case = list(rows[0])[: list(rows[0]).index(MEASURED)]
    stock = {tuple(row[x] for x in of_case): row for row in rows if row["system"] == REFERENCE}
    found = []
    for row in rows:
        if row["system"] != REFERENCE and SYSTEMS[row["system"]].attention:
            right = stock[tuple(row[x] for x in of_case)]["right"]
            asked = row.get("asked") or row["questions"]
            error = math.sqrt(right * (1 - right / asked))
            off = abs(row["right"] - right)
            found.append((off / error if error else off, row["right"], right, asked, error))
    if not found:
        return ""
    _, right, of_vllm, asked, error = max(found)
    return (
        f"Right answers where a system is farthest from vLLM: {right:,} of {asked:,} beside "
        f"{of_vllm:,}; the binomial error of that number is {error:.1f}."
    )


def cases_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Markdown table of rows of `latin_square.Measured.rows`."""
    with_scores = scored(rows)
    right = ["right", "other tokens", "lead there, nats"] if with_scores else []
    return table(
        [*(x.replace("_", " ") for x in columns), *latin_square.HEADINGS, *right],
        (
            [
                *(shown(row[x]) for x in columns),
                *latin_square.cells(row),
                *(_scores(row) if with_scores else ()),
            ]
            for row in rows
        ),
    ) + (f"\n{accuracy(rows)}\n" if with_scores else "")


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


def completions(rows: list[Row], path: Path) -> str:
    equal = [row for row in rows if row["batch"] == "equal"]
    lines(
        equal, "samples", path,
        f"{equal[0]['samples'] * equal[0]['prompts']} requests at once, prompts of "
        f"{equal[0]['prompt_tokens']:,} tokens",
        "samples of each prompt",
    )  # fmt: skip
    return cases_table(rows, ("batch", "samples", "prompts"))


def prepacking(rows: list[Row], path: Path) -> str:
    title = f"{rows[0]['prompts']} prompts, the longest of {rows[0]['longest_tokens']:,} tokens"
    figure, axes = axes_of(title, "", "seconds (median)")
    for place, (name, what) in enumerate(
        (("seconds", "until the last first token"), ("ttft_mean_s", "mean of first tokens"))
    ):
        places = [number + 0.4 * place for number in range(len(rows))]
        axes.bar(places, [row[name] for row in rows], 0.4, label=what)
    axes.set_xticks([number + 0.2 for number in range(len(rows))], [row["way"] for row in rows])
    finish(figure, axes, path)
    return table(
        ["way", "tokens computed", "KV tokens at once", "seconds", "times padded",
         "least to most", "TTFT, mean"],
        (
            [row["way"], shown(row["tokens_computed"]), shown(row["kv_tokens_at_once"]),
             f"{row['seconds']:.2f}", f"{row['times_as_fast_as_padded']:.2f}",
             f"{row['times_min']:.2f} to {row['times_max']:.2f}", f"{row['ttft_mean_s']:.2f}"]
            for row in rows
        ),
    )  # fmt: skip


def packed(rows: list[Row]) -> str:
    times = ", ".join(f"{x['way']} {x['times_as_fast_as_padded']:.2f}" for x in rows)
    return f"Times as fast as padded: {times}."


def tree(rows: list[Row], path: Path) -> str:
    row = rows[0]
    bars(
        rows, "problem_tokens", path,
        f"{row['examples_tokens']:,} tokens for all, {row['problems']} problems, "
        f"{row['samples']} samples of each",
        "tokens of each problem",
    )  # fmt: skip
    return cases_table(rows, ("problem_tokens",))


def _first_tokens(rows: list[Row]) -> dict[tuple[str, str], list[float]]:
    """Times to first token by what was measured, without and with a file."""
    of: dict[tuple[str, str], list[float]] = {}
    for row in (row for row in rows if row["ttft_s"] != ""):
        of.setdefault((row["what"], row["file"]), []).append(row["ttft_s"])
    return of


def first_token(rows: list[Row]) -> str:
    of = _first_tokens(rows)
    what, _ = next(iter(of))
    with_it, without = (statistics.median(of[what, file]) for file in ("with", "without"))
    return f"A server's first token takes {with_it:.2f} s with a KV file, {without:.2f} s without."


def system_kv(rows: list[Row], path: Path) -> str:
    """Time to first token with and without a file, and the rate of loading it."""
    timed = [row for row in rows if row["ttft_s"] != ""]
    of = _first_tokens(rows)
    cases = list(dict.fromkeys(what for what, _ in of))
    tokens = timed[0]["tokens"]
    figure, axes = axes_of(
        f"A system prompt of {tokens:,} tokens",
        "",
        "time to first token, s (median; min to max)",
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
