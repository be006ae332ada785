"""`bench_serving.py`: real servers, the real client, a small model."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suites import bench_serving
from tests.benchmarks.reports import assert_reported, read
from vllm_relay.serving import comparison, processes
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


def test_the_system_prompt_of_the_chats_is_built_and_loaded(
    results: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without servers: the file that `build_system_kv` returns is the one the systems load."""
    asked: dict[str, Any] = {}

    def build(model: Path, output: Path, options: list[str], **_: Any) -> Path:
        asked["prompt"] = Path(options[options.index("--system-prompt") + 1]).read_text()
        return output

    def compare(model: Path, keys: list[str], *_: Any, **more: Any) -> None:
        asked.update(keys=keys, files=more["files"], checked=more["checked"])
        raise RuntimeError("far enough")

    monkeypatch.setattr(bench_serving, "build_system_kv", build)
    monkeypatch.setattr(comparison, "compare", compare)
    monkeypatch.setattr("tempfile.tempdir", str(results))
    options = ["--prefix-tokens", "300", "--model", str(model)]
    assert bench_serving.main(options) == 1
    assert [file.name for file in asked["files"]] == ["prompt.relay"]
    assert asked["prompt"] in asked["checked"][0]
    # nobody knows the prefixes of the client's own prompts beforehand
    assert bench_serving.main([*options, "--dataset", "random"]) == 1
    assert asked["files"] == [] and "relay-system-kv" not in asked["keys"]


def test_servers_are_measured_on_chats_and_on_the_clients_own_prompts(
    results: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs on the same two servers, which the first of them starts."""
    trace = results / "mooncake_conversation_trace.jsonl"
    row = {"timestamp": 0, "input_length": 2000, "output_length": 16, "hash_ids": [0, 1, 2]}
    rows = [row | {"timestamp": 400 * i, "hash_ids": [0, 1, 2, 3 + i]} for i in range(3)]
    rows.append(row | {"input_length": 9000})  # longer than the servers' contexts
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    running: dict[str, processes.Server] = {}
    with ExitStack() as stack:

        @contextmanager
        def serving(model: Path, flags: list[str], log: Path, **given: Any) -> Iterator[Any]:
            if log.stem not in running:
                kept = results / log.name
                started = processes.serving(model, flags, kept, **given)
                running[log.stem] = stack.enter_context(started)
            yield running[log.stem]

        monkeypatch.setattr(comparison, "serving", serving)
        monkeypatch.setattr(bench_serving, "ENV", {"VLLM_CPU_KVCACHE_SPACE": "1"})
        options = "--prefix-tokens 300 --requests 3 --tokens 4 --repeats 1 --per-rate 3 --save "
        options += "--eager --systems stock relay "
        for given in (
            "--rates inf 20 --bound 60",
            "--dataset prefix_repetition --rates inf",
            f"--dataset timed_trace --rates 20 --trace {trace}",
        ):
            given_options = f"{options}{given}".split()
            assert bench_serving.main([*given_options, "--model", str(model)]) == 0
    chats, rows = read(results, "serving")
    others, more = read(results, "serving-prefix_repetition")
    traced, last = read(results, "serving-conversation_trace")
    for row in rows + more + last:
        assert float(row["tokens_per_s"]) > 0 and 0 <= float(row["logprob_rms"]) < 0.1
        assert row["requests"] == "3" and float(row["normalized_s"]) > 0
    assert [(row["rate"], row["system"]) for row in rows] == [
        ("inf", "relay"), ("inf", "stock"), ("20.0", "stock"), ("20.0", "relay")
    ]  # fmt: skip
    assert all(float(row["predicted_attention"]) >= 1 for row in last) and last[0]["tokens"] == "4"
    report = assert_reported(results, chats, traced)
    assert "within 60 s per token: vLLM: at least 20 requests/s" in report
    assert "## Interactive serving, 300 prefix tokens" in report
    assert "| at once, vLLM | at once, relay |" in report and "| TTFT p90 |" in report
    assert {row["system"] for row in more} == {"stock", "relay"} and others.is_file()
