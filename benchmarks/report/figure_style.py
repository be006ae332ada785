"""Style of the report's figures: a colour per system, error bars on every point."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.result_csv import Row
from vllm_relay.serving.systems import SYSTEMS

WIDTH, HEIGHT = 7.0, 4.8
COLOURS = dict(zip(SYSTEMS, ("0.55", "C0", "C1", "C3", "black", "C1", "C2"), strict=True))


def label(key: str) -> str:
    return SYSTEMS[key].label


def panels_of(count: int) -> tuple[Any, list[Any]]:
    """A figure with so many panels, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (WIDTH if count == 1 else 5.5 * count, HEIGHT)
    figure, grid = pyplot.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
    for axes in grid[0]:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid[0])


def axes_of(title: str, x: str, y: str) -> tuple[Any, Any]:
    """A figure with one panel."""
    figure, (axes,) = panels_of(1)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def close(figure: Any) -> None:
    from matplotlib import pyplot

    pyplot.close(figure)


def finish(figure: Any, axes: Any, path: Path, *, log: bool = False) -> None:
    """Writes the file; ``log``: logarithmic y axis, where systems differ by orders of magnitude."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    # Outside: no corner is free in every figure.
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
    close(figure)


def by_system(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows per system, in the order of `SYSTEMS`."""
    found: dict[str, list[Row]] = {key: [] for key in SYSTEMS}
    for row in rows:
        found[row["system"]].append(row)
    return {key: mine for key, mine in found.items() if mine}


def spread(rows: Sequence[Row], middle: str, least: str, most: str) -> list[list[float]]:
    """Error bars, downwards and upwards, from three columns."""
    return [
        [max(0.0, row[middle] - row[least]) for row in rows],
        [max(0.0, row[most] - row[middle]) for row in rows],
    ]


def medians(taken: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Medians of several series, and their error bars downwards and upwards."""
    middle = [statistics.median(x) for x in taken]
    return middle, [
        [m - min(x) for m, x in zip(middle, taken, strict=True)],
        [max(x) - m for m, x in zip(middle, taken, strict=True)],
    ]


def lines(rows: Sequence[Row], x: str, path: Path, title: str, x_label: str) -> None:
    """Seconds of each system against a column, with the range of the rounds."""
    figure, axes = axes_of(title, x_label, "seconds for all (median; min to max)")
    for key, mine in by_system(rows).items():
        axes.errorbar(
            [row[x] for row in mine],
            [row["seconds"] for row in mine],
            spread(mine, "seconds", "seconds_min", "seconds_max"),
            marker="o",
            capsize=3,
            label=label(key),
            color=COLOURS[key],
            linestyle="-" if SYSTEMS[key].attention else ":",
        )
    ticks = sorted({row[x] for row in rows})
    axes.set_xticks(ticks)
    finish(figure, axes, path, log=len(ticks) > 1)


def bars(rows: Sequence[Row], x: str, path: Path, title: str, x_label: str) -> None:
    """Speed-up of each system over vLLM, grouped by a column."""
    figure, axes = axes_of(title, x_label, "speed-up over vLLM (median; min to max)")
    groups = list(dict.fromkeys(row[x] for row in rows))
    of = by_system(rows)
    width = 0.8 / len(of)
    for index, (key, mine) in enumerate(of.items()):
        axes.bar(
            [groups.index(row[x]) + (index - (len(of) - 1) / 2) * width for row in mine],
            [row["times_as_fast_as_stock"] for row in mine],
            width,
            yerr=spread(mine, "times_as_fast_as_stock", "times_min", "times_max"),
            capsize=2,
            label=label(key),
            color=COLOURS[key],
        )
    axes.set_xticks(
        range(len(groups)), [f"{group:,}" if isinstance(group, int) else group for group in groups]
    )
    axes.axhline(1, color="0.8", linewidth=0.8, zorder=0)
    finish(figure, axes, path)
