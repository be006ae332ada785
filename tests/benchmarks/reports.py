"""What tests of benchmarks ask of CSVs and of the report."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from benchmarks.report import attention_figures, figure_style, write_report
from vllm_relay.serving.systems import SYSTEMS


def read(results: Path, name: str) -> tuple[Path, list[dict[str, str]]]:
    (path,) = (x for x in results.glob(f"{name}-*.csv") if x.stem[len(name) + 1].isdigit())
    with path.open() as file:
        return path, list(csv.DictReader(file))


def assert_reported(results: Path, *paths: Path) -> str:
    """The report shows these CSVs, and has a figure of each, in which no text is cut off."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (figure_style, attention_figures):
            patch.setattr(module, "close", assert_whole)
        return _reported(results, paths)


def assert_whole(figure: Any) -> None:
    """Titles, labels of axes and legends lie inside."""
    figure.canvas.draw()
    whole = figure.bbox.padded(1)
    parts = [*figure.legends]
    for axes in figure.axes:
        parts += [axes.title, axes.xaxis.label, axes.yaxis.label]
        parts += [axes.get_legend()] if axes.get_legend() else []
    for part in parts:
        box = part.get_window_extent()
        if box.width:  # there is a text
            assert whole.containsx(box.x0) and whole.containsx(box.x1), part
            assert whole.containsy(box.y0) and whole.containsy(box.y1), part
    pyplot.close(figure)


def _reported(results: Path, paths: Sequence[Path]) -> str:
    assert write_report.main(["--results", str(results), "--output", str(results)]) == 0
    report = (results / "REPORT.md").read_text()
    for path in paths:
        assert path.name in report and path.with_suffix(".png").stat().st_size > 10_000
    return report


def assert_checked(rows: list[dict[str, str]]) -> None:
    """Answers agree, but those of an engine without attention; each relay engine relayed."""
    for row in rows:
        right = float(row["logprob_rms"]) < 0.1 and float(row["logprob_worst"]) < 0.5
        assert right == SYSTEMS[row["system"]].attention
    steps = {row["system"]: 0 for row in rows if SYSTEMS[row["system"]].relay}
    for row in rows:
        if row["system"] in steps:
            steps[row["system"]] += int(row["steps_relayed"])
    assert steps and all(steps.values()), steps
