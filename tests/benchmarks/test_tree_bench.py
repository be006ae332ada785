"""`bench_tree.py`, tiny, on engines of its own: levels are settings of an engine."""

from pathlib import Path

import pytest

from benchmarks.suites import bench_tree
from tests.benchmarks.reports import assert_checked, assert_reported, read

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_one_level_and_two_are_measured(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    options = "--examples 1024 --problem 0 256 --problems 2 --samples 4 --steps 3 --heads 16 16 128"
    assert bench_tree.main([*options.split(), "--repeats", "1", "--save"]) == 0
    path, rows = read(results, "tree")
    assert len(rows) == 2 * 4 and {row["problem_tokens"] for row in rows} == {"0", "256"}
    assert_checked(rows)
    assert_reported(results, path)
