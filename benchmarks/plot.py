"""REPORT.md and its figures, from the newest CSV of each benchmark in results/.

    python benchmarks/plot.py [--results FOLDER] [--output FOLDER]

Nothing is measured here: every number and every figure is of a CSV, which is named. Where there is
an earlier CSV of the same command, the report says how far the two runs are apart.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT
from benchmarks.published import published
from benchmarks.reading import Row, read
from benchmarks.sections import SECTIONS, Ratio, Section, table

# Times vLLM: below it, relay is not said to help.
HELPS = 1.05


def runs(results: Path, name: str) -> list[Path]:
    """The CSVs of a benchmark, the newest first; their names end with date and time."""
    found = [x for x in results.glob(f"{name}-*.csv") if x.stem.removeprefix(name)[1:2].isdigit()]
    return sorted(found, key=lambda path: path.stem, reverse=True)


def relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


def where_it_does_not_help(ratios: Sequence[tuple[str, Ratio]]) -> str:
    """The cases of kinds that have little to gain, whatever was found, and all others that gained
    nothing."""
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


def again(section: Section, newest: Sequence[Row], paths: Sequence[Path], output: Path) -> str:
    """How far the newest run and the one before it, of the same command, are apart."""
    for path in paths[1:]:
        rows = [row for row in read(path) if section.of(row)]
        same = ("command", "device", "cores", "vllm", "torch")
        if not rows or any(rows[0][x] != newest[0][x] for x in same):
            continue
        before = {(x.case, x.system): x for x in section.ratios(rows)}
        pairs = [
            (x, before[x.case, x.system])
            for x in section.ratios(list(newest))
            if (x.case, x.system) in before
        ]
        if not pairs:
            continue
        apart = [abs(x.times / y.times - 1) for x, y in pairs]
        overlap = sum(x.least <= y.most and y.least <= x.most for x, y in pairs)
        return (
            f"Another run of the same command (revision {rows[0]['revision']}, "
            f"[CSV]({relative(path, output)})): in {overlap} of "
            f"{len(pairs)} ratios to vLLM the ranges of the two runs overlap; the medians are "
            f"{statistics.median(apart):.1%} apart (median of the ratios), {max(apart):.1%} at "
            "most.\n\n"
        )
    return ""


def write(section: Section, paths: Sequence[Path], output: Path) -> tuple[str, list[Ratio]]:
    """A section's Markdown and its ratios; the figure lies beside the newest CSV."""
    rows = [row for row in read(paths[0]) if section.of(row)]
    figure = paths[0].with_name(f"{paths[0].stem}{section.suffix}.png")
    found = section.draw(rows, figure)
    row = rows[0]
    text = (
        f"## {section.title}\n\n{section.text}\n\n"
        f"![{section.title}]({relative(figure, output)})\n\n{found}\n"
        f"`{row['command']}`, on {str(row['date'])[:10]}: {row['device']}, {row['cores']} cores, "
        f"vLLM {row['vllm']}, PyTorch {row['torch']}, revision {row['revision']} "
        f"([CSV]({relative(paths[0], output)})).\n\n"
    )
    return text + again(section, rows, paths, output), section.ratios(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--failed", nargs="*", default=[], help="benchmarks whose newest CSV is not of this run"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args(argv)
    sections, ratios = "", []
    for section in SECTIONS:
        paths = [
            path
            for path in runs(args.results, section.name)
            if any(map(section.of, read(path)))  # older ones may lack columns
        ]
        if paths:
            text, found = write(section, paths, args.output)
            sections += text
            ratios += [(section.name, ratio) for ratio in found]
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
        "Made by `python benchmarks/plot.py` from the CSVs in `results/`, the newest of each "
        "benchmark; `make bench` measures them anew. Systems take turns on the same prompts in "
        'one run. "vLLM" alone is vLLM with prefix caching. Ratios are medians of pairs, with the '
        "least and the most of the rounds; no speed is shown unless the answers agree. Engines run "
        "eagerly, without `torch.compile`.\n\n"
        f"{failed}{sections}"
        "## Where it does not help\n\n"
        "First the kinds of cases that have little to gain, whatever was measured.\n\n"
        f"{where_it_does_not_help(ratios)}\n"
        "## What the papers measured\n\n"
        "On other hardware, with vLLM 0.2.6 (RelayAttention) and 0.2.7 (Hydragen): what can be "
        "compared with ours is the shape.\n\n"
        f"{published().rstrip()}\n"
    )
    print(f"wrote {report.relative_to(ROOT) if report.is_relative_to(ROOT) else report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
