"""Traces of `bench_serving.py` without servers: shortened, divided into parts, refused."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import traces
from benchmarks.report import serving_figures
from benchmarks.suites import bench_serving
from vllm_relay.explain.trace import read_trace

ROW = {"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [0, 1]}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_shortened_trace_has_the_same_blocks(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"input_length": 40_000}, ROW | {"output_length": 40_000}]
    kept, left_out = traces.read_shortened(write(tmp_path / "trace.jsonl", rows), 5000)
    assert left_out == 2
    assert kept == [ROW | {"input_length": 129, "output_length": 2}]
    read_trace(write(tmp_path / "shortened.jsonl", kept), traces.KV_BLOCK)


def test_parts_follow_one_another_and_keep_the_ratios_of_arrivals(tmp_path: Path) -> None:
    rows = [ROW | {"timestamp": 100 * i * i, "output_length": i} for i in range(12)]
    args = argparse.Namespace(rates=[1.0, math.inf], per_rate=2, requests=4)
    loads = bench_serving.trace_loads(rows, args, tmp_path)
    sent = []
    for number in (1, 2):
        for make in loads:
            load = make(number)
            lines = Path(load.dataset["dataset-path"]).read_text().splitlines()
            assert len(lines) == load.requests
            part = [json.loads(line) for line in lines]
            assert part[0]["timestamp"] == 0
            sent += [row["output_length"] for row in part]
            seconds = part[-1]["timestamp"] * load.dataset["timed-trace-sec-multiplier"]
            assert seconds == pytest.approx(load.requests / load.rate)
    assert sent == list(range(12))


def test_traces_that_cannot_be_sent_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_serving, "model_path", lambda: tmp_path)
    monkeypatch.setattr(bench_serving, "licence_prompt", lambda *_: "")
    monkeypatch.setattr(bench_serving.Tokenizer, "from_file", lambda *_: None)
    trace = write(tmp_path / "trace.jsonl", [ROW])

    def refused(*more: str) -> str:
        with pytest.raises(SystemExit):
            bench_serving.main(["--dataset", "timed_trace", *more])
        return capsys.readouterr().err

    assert "--trace is the file of --dataset timed_trace" in refused()
    needed = "1 requests, of 1,200 needed"  # 200 of each rate in 3 rounds
    assert needed in refused("--trace", str(trace), "--rates", "1", "6")
    write(trace, [{"timestamp": 0}])
    assert "line 1: KeyError('input_length')" in refused("--trace", str(trace))


def test_a_skipped_system_has_an_empty_cell() -> None:
    row = {"left_out": 0.1, "running": 2.0, "predicted_attention": 1.5}
    rows: list[dict[str, Any]] = [
        row | {"rate": 1.0, "system": "stock"},
        row | {"rate": 1.0, "system": "relay", "running": 1.0},
        row | {"rate": 2.0, "system": "relay", "running": 3.0},
    ]
    lines = serving_figures._predicted(rows).splitlines()
    assert lines[0].startswith("| requests/s | at once, vLLM | at once, relay |")
    assert lines[2:] == ["| 1 | 2.0 | 1.0 | 1.50 to 1.50 |", "| 2 |  | 3.0 | 1.50 to 1.50 |"]
