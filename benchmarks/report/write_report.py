"""REPORT.md and its figures, from the newest CSV of each benchmark in results/.

    python benchmarks/report/write_report.py [--results FOLDER] [--output FOLDER]

Nothing is measured here: every number and figure comes from a CSV that the report names. With
earlier CSVs of the same command the ranges cover all runs, and the report says how far they differ.
"""

import argparse
import os
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import ROOT
from benchmarks.harness.result_csv import Row, read
from benchmarks.report.contents import SECTIONS, Section
from benchmarks.report.markdown import Ratio, table
from benchmarks.report.published import beside

# Columns that identify the workload and the system of a row.
CASE = (
    *("system", "examples", "subjects", "questions", "document_tokens", "prefix_tokens", "lengths"),
    *("examples_tokens", "problem_tokens", "problems", "samples", "requests", "shared_tokens"),
    *("own_tokens", "part", "case", "way", "query_heads", "kv_heads", "head_size", "threads"),
    "caches",
)
# Speed-up below which relay is not said to help.
HELPS = 1.05


def runs(results: Path, name: str) -> list[Path]:
    """The CSVs of a benchmark, the newest first; their names end with date and time."""
    found = [x for x in results.glob(f"{name}-*.csv") if x.stem.removeprefix(name)[1:2].isdigit()]
    return sorted(found, key=lambda path: path.stem, reverse=True)


def relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


def where_it_does_not_help(ratios: Sequence[tuple[str, Ratio]]) -> str:
    """Markdown: workloads with little to gain whatever was found, and others without a speed-up."""
    headings = ["benchmark", "case", "system", "times vLLM", "least to most"]

    def cells(name: str, ratio: Ratio) -> list[str]:
        ranged = f"{ratio.least:.2f} to {ratio.most:.2f}"
        return [name, ratio.case, ratio.system, f"{ratio.times:.2f}", ranged]

    text = ""
    for kind in dict.fromkeys(ratio.kind for _, ratio in ratios if ratio.kind):
        mine = [cells(name, ratio) for name, ratio in ratios if ratio.kind == kind]
        text += f"### {kind.capitalize()}\n\n{table(headings, mine)}\n"
    others = [
        cells(name, x) for name, x in ratios if not x.kind and (x.times < HELPS or x.least < 1)
    ]
    text += f"### Other cases below {HELPS} times, or below 1 in a round\n\n"
    return text + (table(headings, others) if others else "None of those measured here.\n")


def earlier(
    section: Section, newest: Sequence[Row], paths: Sequence[Path]
) -> list[tuple[Path, list[Row]]]:
    """The runs before of the same command, machine and versions: CSVs and rows, newest first."""
    same = ("command", "device", "cores", "vllm", "torch", "kv_gib", "glibc_tunables")
    found = []
    for path in paths[1:]:
        rows = [row for row in read(path) if section.of(row)]
        # an older CSV does not have all of these columns
        alike = rows and all(rows[0].get(x, newest[0].get(x)) == newest[0].get(x) for x in same)
        if alike and mode_of(rows[0]) == mode_of(newest[0]):
            found.append((path, rows))
    return found


def mode_of(row: Row) -> str:
    """Compiled or eager, which older CSVs do not say."""
    return row.get("mode", "eager")


def pooled(*runs: Sequence[Row]) -> list[Row]:
    """Rows of the first run with the range of all runs: processes differ more than their rounds.

    Rows that are single rounds are concatenated; otherwise min and max are of all runs, and
    medians of the first.
    """
    if "round" in runs[0][0]:
        return [{**row, "round": (i, row["round"])} for i, run in enumerate(runs) for row in run]
    of_others = [{case_of(row): row for row in run} for run in runs[1:]]
    rows = []
    for row in runs[0]:
        mine = [row, *(x[case_of(row)] for x in of_others if case_of(row) in x)]
        known = [x for x in row if all(r.get(x, "") != "" for r in mine)]  # older CSVs have less
        least = {x: min(r[x] for r in mine) for x in known if x.endswith("_min")}
        most = {x: max(r[x] for r in mine) for x in known if x.endswith("_max")}
        rows.append({**row, **least, **most})
    return rows


def case_of(row: Row) -> tuple[Any, ...]:
    """Identity of a row: workload and system."""
    return tuple(row.get(x) for x in CASE)


def apart(section: Section, newest: Sequence[Row], before: Sequence[Sequence[Row]]) -> str:
    """Sentence on the distance of a run from the earlier ones; "" without ratios."""
    theirs = {(x.case, x.system): x for x in section.ratios(pooled(*before))}
    mine = section.ratios(list(newest))
    pairs = [(x, theirs[x.case, x.system]) for x in mine if (x.case, x.system) in theirs]
    if not pairs:
        return ""
    distances = [abs(x.times / y.times - 1) for x, y in pairs]
    overlap = sum(x.least <= y.most and y.least <= x.most for x, y in pairs)
    return (
        f" In {overlap} of {len(pairs)} speed-ups the range of the newest run alone overlaps "
        f"that of the earlier runs; medians are {statistics.median(distances):.1%} apart (median "
        f"of the speed-ups), at most {max(distances):.1%}."
    )


def finding(section: Section, rows: list[Row], ratios: Sequence[Ratio]) -> str:
    """Markdown: what a section's rows say, with a link to it; "" where that is only a figure."""
    of: dict[str, list[Ratio]] = {}
    for ratio in ratios:
        of.setdefault(ratio.system, []).append(ratio)
    said = []
    for system, mine in of.items():
        least, most = (end(mine, key=lambda ratio: ratio.times) for end in (min, max))
        middle = statistics.median(ratio.times for ratio in mine)
        said.append(
            f"{system}: {middle:.2f} times vLLM's speed in the median case, from {least.times:.2f} "
            f"({least.case}) to {most.times:.2f} ({most.case})."
            if len(mine) > 1
            else f"{system}: {middle:.2f} times vLLM's speed ({most.case})."
        )
    said += [text] if (text := section.learned(rows)) else []
    anchor = re.sub(r"[^a-z0-9 -]", "", section.title.lower()).replace(" ", "-")
    return f"- [{section.title}](#{anchor}): {' '.join(said)}\n" if said else ""


def write(section: Section, paths: Sequence[Path], output: Path) -> tuple[str, str, list[Ratio]]:
    """A section's Markdown, its finding and its ratios; the figure lies beside the newest CSV."""
    newest = rows = [row for row in read(paths[0]) if section.of(row)]
    again = ""
    if found_before := earlier(section, newest, paths):
        before = [found for _, found in found_before]
        rows = pooled(newest, *before)
        what = "Rounds are" if "round" in newest[0] else "Min and max are"
        others = ", ".join(
            f"revision {found[0]['revision']} ([CSV]({relative(path, output)}))"
            for path, found in found_before
        )
        again = (
            f"{what} of this run and of earlier runs of the same command: {others}."
            f"{apart(section, newest, before)}\n\n"
        )
    figure = paths[0].with_name(f"{paths[0].stem}{section.suffix}.png")
    found = section.draw(rows, figure)
    row = rows[0]
    text = (
        f"## {section.title}\n\n{section.text}\n\n"
        f"![{section.title}]({relative(figure, output)})\n\n{found}\n"
        f"`{row['command']}`, on {str(row['date'])[:10]}: {row['device']}, {row['cores']} cores, "
        f"vLLM {row['vllm']}, PyTorch {row['torch']}, {mode_of(row)}, revision "
        f"{row['revision']} ([CSV]({relative(paths[0], output)})).\n\n"
    )
    ratios = section.ratios(rows)
    return text + again, finding(section, rows, ratios), ratios


def parts(section: Section, paths: Sequence[Path]) -> list[tuple[Section, list[Path]]]:
    """The section, or one for each value of its column `by`, with the CSVs of each."""
    if not section.by:
        return [(section, list(paths))] if paths else []
    of: dict[Any, list[Path]] = {}
    for path in paths:
        of.setdefault(read(path)[0][section.by], []).append(path)
    name = section.by.replace("_", " ")
    return [
        (replace(section, title=f"{section.title}, {value:,} {name}"), of[value])
        for value in sorted(of)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--failed", nargs="*", default=[], help="benchmarks whose newest CSV is not of this run"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args(argv)
    sections, findings, ratios = "", "", []
    for section in SECTIONS:
        paths = [
            path
            for path in runs(args.results, section.name)
            if any(map(section.of, read(path)))  # older ones may lack columns
        ]
        for part, of_part in parts(section, paths):
            text, learned, found = write(part, of_part, args.output)
            sections += text
            findings += learned
            # Attention that is always relayed is nobody's to serve.
            ratios += [(section.name, x) for x in found if section.name != "attention"]
        if paths:
            sections += beside(f"{section.name}{section.suffix}")
    if not sections:
        print(f"no CSV of a benchmark in {args.results}")
        return 1
    failed = ""
    if args.failed:
        failed = (
            f"**Failed in the last run, older figures are shown: {', '.join(args.failed)}.**\n\n"
        )
    report = args.output / "REPORT.md"
    report.write_text(
        "# What relay brings, and where it does not help\n\n"
        f"{failed}{findings}"
        "- [Where it does not help](#where-it-does-not-help): the cases that gain little.\n\n"
        "## How it was measured\n\n"
        "Written by `python benchmarks/report/write_report.py` from the newest CSVs in "
        "`results/`; `make bench` measures them anew. Systems run interleaved on the same prompts. "
        'The baseline "vLLM" is vLLM with prefix caching. Speed-ups are medians of pairs, with the '
        "range of the rounds. No speed is shown unless the answers agree; those of the engine "
        "without attention must not. Engines run eagerly, without `torch.compile`, or compiled, as "
        "each section says. On a machine with two cores vLLM computes on one, where a section does "
        "not give a number of threads. `make bench` starts all engines eagerly. All have "
        "`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`: in huge pages the "
        "place of their memory matters less. Measurements published in the papers stand beside "
        "ours: on other hardware, with other models and vLLM 0.2, only the shape compares. For "
        "commands run more than once the ranges cover all runs, and the report says how far the "
        "newest is from the earlier ones; of two equal runs with three rounds each, one range in "
        "ten would not overlap. Commands are those of their revision; the scripts lie in "
        "`benchmarks/suites` since.\n\n"
        f"{sections}"
        "## Where it does not help\n\n"
        "First the kinds of workloads in which sharing has little to gain, whatever was found.\n\n"
        f"{where_it_does_not_help(ratios).rstrip()}\n"
    )
    print(f"wrote {report.relative_to(ROOT) if report.is_relative_to(ROOT) else report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
