"""Requests of `bench_learn.py` to two engines, and the rows made of their answers."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.engines import Finished
from benchmarks.suites import bench_learn
from tests.benchmarks.reports import read

OPTIONS = "--tenants 3 --prefix 128 --own 8 --generate 1 --requests 6 --repeats 2 --save"


class Recorded:
    """Stands for an engine: a first token after ``seconds``, ``answer`` to every prompt."""

    def __init__(self, seconds: float, answer: int = 7) -> None:
        self._seconds, self._answer = seconds, answer
        self.rounds: list[list[list[int]]] = []

    def forget(self) -> None:
        self.rounds.append([])

    def finish(self, prompts: list[list[int]], lengths: list[int]) -> Finished:
        self.rounds[-1] += prompts
        answer = [(self._answer, -0.1, 1.0)] * lengths[0]
        return Finished(1.0, self._seconds, lengths[0], 128, [answer], 0.0)


def _run(options: str, monkeypatch: pytest.MonkeyPatch, **engines: Recorded) -> int:
    monkeypatch.setattr(bench_learn, "two_engines", lambda limits: nullcontext(engines))
    return bench_learn.main(options.split())


def test_both_get_the_same_trace_and_each_round_another(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lru, learn = Recorded(0.2), Recorded(0.1)
    assert _run(f"{OPTIONS} --shift-every 0 2", monkeypatch, lru=lru, learn=learn) == 0
    assert lru.rounds == learn.rounds and [len(x) for x in lru.rounds] == [6] * 4
    assert lru.rounds[0] != lru.rounds[1]
    assert {len(prompt) for sent in lru.rounds for prompt in sent} == {136}
    _, rows = read(results, "learn")
    found = [(x["shift_every"], x["round"], x["way"], x["ttft_p50_s"]) for x in rows]
    assert found == [
        (shift, number, way, ttft_s)
        for shift in ("0", "2")
        for number in ("0", "1")
        for way, ttft_s in (("lru", "0.2"), ("learn", "0.1"))
    ]
    assert {row["cached_tokens"] for row in rows} == {str(6 * 128)}


def test_wrong_answers_give_no_time(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lru, learn = Recorded(0.2), Recorded(0.1, answer=8)
    assert _run(OPTIONS, monkeypatch, lru=lru, learn=learn) == 1
    printed = capsys.readouterr().out
    assert "answers differ, no speed is reported" in printed and "TTFT" not in printed
    assert not list(results.glob("*.csv"))
