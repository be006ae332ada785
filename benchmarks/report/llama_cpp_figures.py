"""Figure and tables of vLLM, relay and llama.cpp on a CPU."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.harness.result_csv import Row
from benchmarks.report.figure_style import COLOURS, finish, label, medians, panels_of
from benchmarks.report.markdown import table
from vllm_relay.serving.systems import SYSTEMS

# Threads, shared tokens, requests -> system -> a row per round.
Grid = dict[tuple[int, int, int], dict[str, list[Row]]]
HEADINGS = ("threads", "shared tokens", "requests", "tokens/s", "TTFT, s", "TPOT, ms", "most")


def draw(rows: list[Row], path: Path) -> str:
    """Tokens per second by threads, shared length and requests; llama.cpp's settings below."""
    grid = _grid(rows)
    _figure(grid, path)
    tried: dict[tuple[int, str], list[Row]] = {}
    for row in (row for row in rows if row["part"] == "settings"):
        tried.setdefault((row["threads"], row["settings"]), []).append(row)
    names = " / ".join(map(_name, next(iter(grid.values()))))
    cases = table(HEADINGS, grid_lines(rows))
    grid_text = f"{names}; medians of rounds:\n\n{cases}\n{who_leads(rows)}\n"
    if not tried:
        return grid_text
    settings = table(
        ["threads", "llama.cpp's settings", "tokens/s", "TTFT, s", "TPOT, ms"],
        ([threads, name, *_cells([found])] for (threads, name), found in tried.items()),
    )
    return f"{grid_text}\n{settings}"


def who_leads(rows: list[Row]) -> str:
    """In how many cases each system has the most tokens per second."""
    grid = _grid(rows)
    leads = Counter(_name(_leader(found)) for found in grid.values())
    counts = ", ".join(f"{name} in {count}" for name, count in leads.most_common())
    return f"Most tokens per second of {len(grid)} cases: {counts}."


def _grid(rows: list[Row]) -> Grid:
    grid: Grid = {}
    for row in (row for row in rows if row["part"] == "grid"):
        case = row["threads"], row["shared_tokens"], row["requests"]
        grid.setdefault(case, {}).setdefault(row["system"], []).append(row)
    return grid


def _leader(found: dict[str, list[Row]]) -> str:
    return max(found, key=lambda system: _median(found[system], "tokens_per_s"))


def grid_lines(rows: list[Row]) -> list[list[str]]:
    """Cells under `HEADINGS` of each case; of several systems in one cell, in their order."""
    return [
        [*(f"{x:,}" for x in case), *_cells(found.values()), _name(_leader(found))]
        for case, found in _grid(rows).items()
    ]


def _cells(found: Iterable[Sequence[Row]]) -> list[str]:
    """Medians of some systems: tokens per second, TTFT, TPOT."""
    runs = list(found)
    return [
        " / ".join(f"{_median(rows, 'tokens_per_s'):,.0f}" for rows in runs),
        " / ".join(f"{_median(rows, 'ttft_p50_s'):.2f}" for rows in runs),
        " / ".join(f"{1e3 * _median(rows, 'tpot_p50_s'):.0f}" for rows in runs),
    ]


def _figure(grid: Grid, path: Path) -> None:
    systems = list(next(iter(grid.values())))
    all_threads = list(dict.fromkeys(case[0] for case in grid))
    figure, panels = panels_of(len(all_threads))
    for axes, threads in zip(panels, all_threads, strict=True):
        cases = [case for case in grid if case[0] == threads]
        for number, system in enumerate(systems):
            runs = [[row["tokens_per_s"] for row in grid[case][system]] for case in cases]
            middle, bounds = medians(runs)
            axes.bar(
                [x + 0.28 * (number - 1) for x in range(len(cases))],
                middle,
                0.26,
                yerr=bounds,
                capsize=2,
                color=COLOURS.get(system, "C4"),
                label=_name(system) if axes is panels[0] else None,
            )
        axes.set_title(f"{threads} {'thread' if threads == 1 else 'threads'}", fontsize="medium")
        axes.set_xticks(range(len(cases)), [f"{shared:,}\n{n}" for _, shared, n in cases])
        axes.set_xlabel("shared tokens, requests at once")
        axes.set_ylabel("tokens per second (median; min to max)")
    finish(figure, panels[0], path)


def _median(rows: Sequence[Row], name: str) -> float:
    return float(statistics.median(row[name] for row in rows))


def _name(system: str) -> str:
    return label(system) if system in SYSTEMS else system
