"""Calibration and the benchmarks of the cost model, each once, small, on the real engine."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.suites import bench_choice
from tests.engine.engine import ROOT, environment
from vllm_relay.sharing.cost_store import load

pytestmark = [pytest.mark.engine, pytest.mark.slow]
# The engine in the script's own process: one start of Python and vLLM less.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def run(*command: str, cwd: Path, status: tuple[int, ...] = (0,), **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(**env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in status, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def test_calibrate_measures_and_keeps_what_the_backend_then_finds(tmp_path: Path) -> None:
    kept = tmp_path / "devices.json"
    text = run(
        *("-m", "vllm_relay.cli", "calibrate", "--shape", "4/2/64", "--max-model-len", "4096"),
        "--json",
        cwd=tmp_path,
        VLLM_RELAY_DEVICES=str(kept),
    )
    shown = json.loads(text)
    assert shown["path"] == str(kept)
    (entry,) = load(kept)
    assert (entry.heads, entry.kv_heads, entry.head_size, entry.dtype) == (4, 2, 64, "bfloat16")
    assert all(sum(asdict(x).values()) > 0 for x in (entry.stock, entry.context, entry.system))
    assert entry.copy > 0
    # a fit of nonsense would be off by much more
    (measured,) = shown["measured"]
    assert all(error < 0.5 for error in measured["errors"].values()), measured["errors"]


def test_the_grid_runs_and_outputs_agree(tmp_path: Path) -> None:
    text = run(
        str(ROOT / "benchmarks" / "suites" / "bench_choice.py"),
        *("--heads", "2", "1", "64", "--points", "3", "--kv-gib", "1"),
        cwd=tmp_path,
        # so small a run need not reach the bars, but it has to measure
        status=(0, 1),
        VLLM_RELAY_DEVICES=str(tmp_path / "none.json"),
        **IN_PROCESS,
    )
    assert "outputs differ" not in text
    assert re.search(r"points\s+│\s+3 ", text), text


def test_planning_is_timed_in_a_step(tmp_path: Path) -> None:
    text = run(
        str(ROOT / "benchmarks" / "suites" / "bench_planning.py"),
        *("--heads", "2", "1", "64", "--requests", "6", "--shared", "512", "--steps", "8"),
        cwd=tmp_path,
        **IN_PROCESS,
    )
    line = r"6 requests, 512 shared tokens, groups {}.*?: a plan takes \d+\.\d\d ms"
    text = " ".join(text.split())
    assert re.search(line.format("kept"), text) and re.search(line.format("chosen anew"), text), (
        text
    )


def test_points_below_the_bars_are_counted() -> None:
    measured = {
        "stock_ms": 1.0,
        "relay_ms": 1.25,
        "alone_ms": 3.0,
        "always_ms": 2.0,
        "choice": "groups",
        "shares": True,
        "ratio": 0.8,
        "quartiles": [0.79, 0.81],
        "threads": 1,
        "rounds": 11,
        "predicted_stock_ms": 1.5,
        "predicted_alone_ms": 2.0,
        "predicted_always_ms": 1.0,
        "relative_difference": 0.001,
    }
    point = bench_choice.Point(requests=8, shared=512, own=16)
    rows = [
        bench_choice.row_of(point, {**measured, "ratio": ratio, "of_best": best}, [1] * 3)
        for ratio, best in ((0.8, 0.8), (1.0, 1.0), (1.0, 0.9))
    ]
    found = bench_choice.summary(rows)
    assert found["points"] == 3
    assert found["points below 0.98 of vLLM's"] == 1
    assert found["points below 0.98 of the best"] == 2
    assert found["lowest, of vLLM's speed"] == 0.8


def test_the_grid_has_the_steps_it_is_for() -> None:
    grid = bench_choice.grid()
    assert len(grid) >= 150 and len(set(grid)) == len(grid)
    for name, lowest, highest in (
        ("requests", 1, 128), ("shared", 0, 8192), ("own", 16, 16384), ("groups", 1, 16),
        ("queries", 1, 4096), ("window", 0, 1024), ("sinks", False, True),
    ):  # fmt: skip
        values = [getattr(point, name) for point in grid]
        assert (min(values), max(values)) == (lowest, highest), name
    assert {point.kind for point in grid} == {"decode", "verify", "prefill", "mixed"}
