"""Remembered prefixes are found after a restart, or left out with one line."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.system_kv import remembering_engine
from tests.unit.system_kv.remembering_engine import BLOCK, HOT, Engine, broken, saved
from vllm_relay.system_kv import writer
from vllm_relay.system_kv.messages import WorkerMetadata
from vllm_relay.system_kv.placement import Placement
from vllm_relay.system_kv.remembered_files import hottest_first


@pytest.mark.parametrize("damage", ["removed", "cut", "flipped"])
def test_a_file_that_cannot_be_loaded_is_one_line_and_the_request_runs(
    damage: str, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    engine.ask(HOT)
    engine.stop()
    (path,) = hottest_first(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "removed":  # by another server, since they were listed
        path.unlink()
        monkeypatch.setattr(remembering_engine, "hottest_first", lambda folder: [path])
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    second = Engine(tmp_path)
    assert second.request([*HOT, 1, 2, 3, 4]) == 0
    assert second.request([*HOT, 1, 2, 3, 4]) == 7
    assert len(lines) == 1 and lines[0].startswith(f"remembered prefix not loaded: {path}: ")
    assert second.pool.get_num_free_blocks() == 64


@pytest.mark.parametrize("lost", [0, 1])
def test_what_follows_a_prefix_that_was_not_loaded_is_not_found(
    lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    first = Engine(tmp_path)
    longer = [*HOT, *range(900, 900 + 4 * BLOCK)]
    first.ask(HOT)
    first.save()
    (hottest,) = hottest_first(tmp_path)
    first.ask(longer)
    first.stop()
    os.utime(hottest, (2**31, 2**31))
    assert saved(tmp_path) == [HOT, longer]
    write, numbers = writer.Writer._write_group, iter(range(2))

    def fails(self: Any, *args: Any) -> int:
        return broken() if next(numbers) == lost else write(self, *args)

    monkeypatch.setattr(writer.Writer, "_write_group", fails)
    second = Engine(tmp_path)
    assert second.pool.get_num_free_blocks() == 64 - 10
    assert second.request([*longer, 1, 2, 3, 4]) == (0, 6)[lost]
    assert second.pool.get_num_free_blocks() == 64 and len(lines) == 1


def test_only_what_all_workers_wrote_counts() -> None:
    both, one = ("a", Placement((1, 2), 0)), ("b", Placement((1, 2, 3), 2))
    other = "b", Placement((1, 2, 3), 0)  # it had no file to share with
    answers = [WorkerMetadata(0, warm=frozenset(x)) for x in ({both, one}, {both, other})]
    assert answers[0].aggregate(answers[1]).warm == {both}


@pytest.mark.parametrize("how", ["reset", "changed"])
def test_blocks_are_free_if_the_weights_may_be_others(
    how: str, tmp_path: Path, lines: list[str]
) -> None:
    first = Engine(tmp_path)
    first.ask(HOT)
    first.stop()
    second = Engine(tmp_path)
    assert second.pool.get_num_free_blocks() == 64 - 6
    if how == "reset":
        assert second.pool.reset_prefix_cache()
    else:
        second.remembering.written("the model's weights were changed", frozenset())
        assert lines == ["remembered prefixes not loaded: the model's weights were changed"]
    assert second.pool.get_num_free_blocks() == 64
    assert second.request([*HOT, 1, 2, 3, 4]) == 0


def test_what_fits_is_loaded_and_the_hottest_is_evicted_last(tmp_path: Path) -> None:
    engine = Engine(tmp_path, blocks=256)
    prompts = [list(range(i, i + 6 * BLOCK)) for i in (2000, 3000, 4000)]
    for times, prompt in zip((3, 9, 6), prompts, strict=True):
        engine.ask(prompt, times)
    engine.stop()
    assert saved(tmp_path) == [prompts[1], prompts[2], prompts[0]]
    small = Engine(tmp_path, blocks=25)  # 12 blocks are for remembered prefixes
    small.request(list(range(7000, 7000 + 2 * BLOCK)))
    small.request(list(range(8000, 8000 + 12 * BLOCK)))  # evicts the coldest of 12
    assert small.request([*prompts[1], 1, 2, 3, 4]) == 6
    empty = Engine(tmp_path, blocks=25)
    assert empty.request([*prompts[0], 1, 2, 3, 4]) == 0
