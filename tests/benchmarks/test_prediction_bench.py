"""bench_prediction without engines: its rows, what it refuses, the report's figure and table."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.latin_square import Measured
from benchmarks.report import decode_figures
from benchmarks.suites import bench_prediction
from vllm_relay.serving.agreement import Distance, WrongAnswers

HEADS = (16, 4, 128)
WORKLOAD = bench_prediction.make_workload(4, 2, 256, 8, 5)


def _measured(stock: list[float], relay: list[float], bare: list[float]) -> Measured:
    """Steps of so many milliseconds, a round each."""
    measured = Measured()
    for key, steps in zip(bench_prediction.KEYS, (stock, relay, bare), strict=True):
        measured.decode_tok_s[key] = [1e3 * 4 / ms for ms in steps]
    measured.counted["relay"] = {"steps": 8, "steps_relayed": 5, "planning_seconds": 0.006}
    measured.distances["relay"] = Distance(0.01, 0.02)
    return measured


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_prediction, "predict", lambda *_: (2.2, "costs of AMD EPYC"))


def test_every_model_has_whole_heads() -> None:
    assert not any(bench_prediction.WIDTH % heads for heads, *_ in bench_prediction.SHAPES)


def test_attention_is_what_a_step_takes_beyond_one_without(predicted: None) -> None:
    measured = _measured([50.0, 51.0, 70.0], [30.0, 30.5, 31.0], [10.0, 10.0, 10.0])
    row = bench_prediction.row_of(measured, WORKLOAD, HEADS)
    assert row["attention_speedup"] == 2.0 and row["attention_speedup_max"] == 2.8571
    assert row["error"] == pytest.approx(0.1) and row["shared_tokens"] == 256
    assert row["no_attention_step_ms"] == 10.0 and row["planning_ms"] == 0.75


def test_attention_within_the_spread_of_steps_is_refused(predicted: None) -> None:
    measured = _measured([12.0, 12.0], [11.5, 13.0], [10.0, 14.0])
    with pytest.raises(WrongAnswers, match=r"requests 4, .*lost in the spread"):
        bench_prediction.row_of(measured, WORKLOAD, HEADS)


def test_explain_sees_the_prefixes_of_the_workload() -> None:
    prompts, _ = WORKLOAD.make_round(0)
    assert prompts[0][:256] == prompts[2][:256] != prompts[1][:256]
    speedup, source = bench_prediction.predict(WORKLOAD, HEADS)
    assert speedup >= 1 and "costs of" in source


def test_the_report_shows_each_workload_and_the_errors(tmp_path: Path, predicted: None) -> None:
    rows: list[dict[str, Any]] = []
    for stock in ([50.0, 51.0], [90.0, 92.0], [24.0, 26.0]):
        measured = _measured(stock, [30.0, 30.0], [10.0, 10.0])
        rows.append(bench_prediction.row_of(measured, WORKLOAD, HEADS))
    text = decode_figures.prediction(rows, tmp_path / "prediction.png")
    assert text.count("| 16/4 |") == 3 and "From costs of AMD EPYC." in text
    assert "of 3 workloads are off by 46% (median), 193% at most." in text
    assert (tmp_path / "prediction.png").stat().st_size > 10_000
