"""`bench_serving.py`, tiny, on real servers and with the real client."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.suites import bench_serving
from tests.benchmarks.reports import assert_reported, read
from vllm_relay.serving.agreement import WrongAnswers

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_wrong_answers_give_no_speed(
    results: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*_: Any, **__: Any) -> None:
        raise WrongAnswers("relay [/is off]: no speed is reported")  # as logs have it: no markup

    monkeypatch.setattr(bench_serving.comparison, "compare", compare)
    monkeypatch.setattr("tempfile.tempdir", str(results))  # logs stay
    options = "--prefix-tokens 300 --systems stock relay --save --model"
    assert bench_serving.main([*options.split(), str(model)]) == 1
    printed = capsys.readouterr().out
    assert "no speed is reported" in printed and "tokens/s" not in printed
    assert not list(results.glob("*.csv"))


def test_servers_are_measured_on_chats_and_on_the_clients_own_prompts(
    results: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_serving, "ENV", {"VLLM_CPU_KVCACHE_SPACE": "1"})
    options = "--prefix-tokens 300 --requests 3 --tokens 4 --repeats 1 --seconds 0.15 --save "
    chat = "--systems stock relay-system-kv --rates inf 20 --bound 60"
    for given in (chat, "--systems stock relay --dataset prefix_repetition --rates inf"):
        assert bench_serving.main([*f"{options}{given}".split(), "--model", str(model)]) == 0
    chats, rows = read(results, "serving")
    others, more = read(results, "serving-prefix_repetition")
    for row in rows + more:
        assert float(row["tokens_per_s"]) > 0 and 0 <= float(row["logprob_rms"]) < 0.1
        assert row["requests"] == "3" and float(row["normalized_s"]) > 0
    assert [(row["rate"], row["system"]) for row in rows] == [
        ("inf", "relay-system-kv"), ("inf", "stock"), ("20.0", "stock"), ("20.0", "relay-system-kv")
    ]  # fmt: skip
    assert "within 60 s per token: vLLM: at least 20 requests/s" in assert_reported(results, chats)
    assert {row["system"] for row in more} == {"stock", "relay"} and others.is_file()
