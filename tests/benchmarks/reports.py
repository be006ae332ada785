"""What tests of benchmarks ask of CSVs and of the report."""

import csv
from pathlib import Path

from benchmarks import plot


def read(results: Path, name: str) -> tuple[Path, list[dict[str, str]]]:
    (path,) = (x for x in results.glob(f"{name}-*.csv") if x.stem[len(name) + 1].isdigit())
    with path.open() as file:
        return path, list(csv.DictReader(file))


def assert_reported(results: Path, *paths: Path) -> str:
    """The report shows these CSVs, and has a figure of each."""
    assert plot.main(["--results", str(results), "--output", str(results)]) == 0
    report = (results / "REPORT.md").read_text()
    for path in paths:
        assert path.name in report and path.with_suffix(".png").stat().st_size > 10_000
    return report
