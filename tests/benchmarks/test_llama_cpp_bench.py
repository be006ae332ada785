"""`bench_llama_cpp.py`: with llama.cpp's server where `make llama` has built it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness import llama_cpp, result_csv
from benchmarks.suites import bench_llama_cpp
from tests.benchmarks.reports import assert_reported, read
from vllm_relay.serving.agreement import WrongAnswers

pytestmark = [pytest.mark.engine]
BUILT = (llama_cpp.FOLDER / "llama-server").is_file()


def test_without_a_build_it_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llama_cpp, "FOLDER", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert bench_llama_cpp.main(["--threads", "1"]) == 1
    assert "no llama-server in .llama.cpp: run `make llama`" in capsys.readouterr().out


def rows(part: str, settings: str, system: str, tokens_per_s: list[float]) -> list[dict[str, Any]]:
    case = {"part": part, "threads": 1, "settings": settings, "shared_tokens": 1024, "requests": 8}
    times = {"ttft_p50_s": 0.5, "tpot_p50_s": 0.025}
    return [
        {**case, "round": i, "system": system, "tokens_per_s": x, **times}
        for i, x in enumerate(tokens_per_s)
    ]


def test_the_fastest_settings_are_those_of_the_highest_median() -> None:
    tried = rows("settings", "slow", "llama.cpp", [40, 41, 99])
    tried += rows("settings", "fast", "llama.cpp", [50, 52, 51])
    assert bench_llama_cpp.fastest(tried) == "fast"


def test_the_report_says_who_is_fastest(tmp_path: Path) -> None:
    measured = rows("settings", "f16", "llama.cpp", [50, 51, 52])
    for system, speeds in (("stock", [100, 110]), ("relay", [300, 310]), ("llama.cpp", [80, 90])):
        measured += rows("grid", "f16" if system == "llama.cpp" else "", system, speeds)
    path = result_csv.write_csv(tmp_path / "llama_cpp.csv", measured, result_csv.source())
    report = assert_reported(tmp_path, path)
    assert (
        "| 1 | 1,024 | 8 | 105 / 305 / 85 | 0.50 / 0.50 / 0.50 | 25 / 25 / 25 | relay |" in report
    )
    finding = "- [llama.cpp beside vLLM and relay](#llamacpp-beside-vllm-and-relay): Most tokens"
    assert f"{finding} per second of 1 cases: relay in 1." in report
    assert "| 1 | f16 | 51 | 0.50 | 25 |" in report


def test_servers_that_answer_otherwise_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"stock": "yes it is", "llama.cpp": "no it is not"}

    def client(server: Any, prompts: list[str], tokens: int) -> dict[str, Any]:
        times = dict.fromkeys(
            ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms"), 1.0
        )
        texts = [answers[server] for _ in prompts]
        return {**times, "generated_texts": texts, "input_lens": [5 for _ in prompts]}

    monkeypatch.setattr(bench_llama_cpp, "client", client)
    servers: Any = {key: key for key in answers}
    args = SimpleNamespace(repeats=1, tokens=4)

    def timed() -> list[dict[str, Any]]:
        ask = lambda shared, requests, number: ["?"] * requests  # noqa: E731
        return bench_llama_cpp.timed(servers, ask, (64, 3), args, print)

    with pytest.raises(WrongAnswers, match=r"llama.cpp: 0 of 6 answers"):
        timed()
    answers["llama.cpp"] = "yes indeed"
    assert [row["begin_alike"] for row in timed()] == [3, 3]


@pytest.mark.slow
@pytest.mark.skipif(not BUILT, reason="llama.cpp is not built: make llama")
def test_three_servers_answer_the_same_prompts(results: Path) -> None:
    name = next(iter(llama_cpp.SETTINGS))
    options = "--shared 64 --requests 1 2 --threads 1 --tokens 4 --repeats 1 --eager --save"
    assert bench_llama_cpp.main([*options.split(), "--settings", name]) == 0
    path, found = read(results, "llama_cpp")
    assert [row["system"] for row in found] == ["stock", "relay", "llama.cpp"] * 2
    assert len({(row["requests"], row["prompt_tokens"]) for row in found}) == 2
    assert all(float(row["tokens_per_s"]) > 0 for row in found)
    assert_reported(results, path)
