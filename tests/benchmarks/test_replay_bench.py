"""Requests of `bench_replay.py`, made of a trace, and the rows made of their answers."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.suites import bench_replay
from tests.benchmarks.reports import read

TRACE = [[1, 2, 3], [1, 2, 4], [5]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Ways and prompts that were sent, to nobody: half of each prompt is cached."""
    found: list[tuple[str, list[int]]] = []

    @contextmanager
    def serving(model: Path, flags: list[str], log: Path, **given: Any) -> Any:
        yield SimpleNamespace(way=log.stem, flags=flags)

    def ask(client: Any, server: Any, prompt: list[int]) -> tuple[float, int, int]:
        found.append((server.way, prompt))
        assert server.flags[server.flags.index("--num-gpu-blocks-override") + 1] == "5"
        learns = "learn" in server.flags[-1]
        return (0.1 if learns else 0.2), len(prompt) // 2, 7

    monkeypatch.setattr(bench_replay, "serving", serving)
    monkeypatch.setattr(bench_replay, "ask", ask)
    return found


def test_both_servers_get_the_blocks_of_the_trace(
    results: Path, tmp_path: Path, asked: list[tuple[str, list[int]]]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"hash_ids": blocks}) + "\n" for blocks in TRACE))
    assert bench_replay.main([str(trace), "--save"]) == 0
    sent = {way: [x for w, x in asked if w == way] for way in ("lru", "learn")}
    assert sent["lru"] == sent["learn"]
    first, second, third = sent["lru"]
    assert [len(x) for x in sent["lru"]] == [97, 97, 33]
    assert first[:64] == second[:64] and first[64:] != second[64:] and third[:32] != first[:32]
    _, rows = read(results, "replay")
    assert [(row["way"], row["ttft_p50_s"]) for row in rows] == [("lru", "0.2"), ("learn", "0.1")]
    assert {row["cached_tokens"] for row in rows} == {str(48 + 48 + 16)}
    assert {row["distinct_blocks"] for row in rows} == {"5"}


@pytest.mark.parametrize("line", ["{}", "no JSON", '{"hash_ids": [1, "x"]}'])
def test_a_line_without_blocks_is_named(line: str, tmp_path: Path, capsys: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"hash_ids": [1]}}\n{line}\n')
    with pytest.raises(SystemExit):
        bench_replay.main([str(trace)])
    assert f"{trace}, line 2: no hash_ids" in capsys.readouterr().err
