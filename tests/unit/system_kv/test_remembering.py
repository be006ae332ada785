"""Hot prefixes are saved, found after a restart, and cost nobody else a block or an answer."""

import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.system_kv import remembering_engine
from tests.unit.system_kv.remembering_engine import BLOCK, NAMES, Engine, kv_of
from vllm_relay.system_kv import remembering as module
from vllm_relay.system_kv import saver, writer
from vllm_relay.system_kv.file import SystemKVFile
from vllm_relay.system_kv.messages import Report, WorkerMetadata
from vllm_relay.system_kv.placement import Placement
from vllm_relay.system_kv.remembered_files import hottest_first

HOT = list(range(100, 100 + 6 * BLOCK))


def _ask(engine: Engine, prompt: list[int], times: int = 4, salt: str | None = None) -> None:
    for i in range(times):
        engine.request([*prompt, *range(1000 * i, 1000 * i + 2 * BLOCK)], salt)


def _saved(folder: Path) -> list[list[int]]:
    """The prefixes in a folder, the hottest first."""
    return [list(SystemKVFile(path).manifest.token_ids) for path in hottest_first(folder)]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines said once, and warnings."""
    said: list[str] = []
    monkeypatch.setattr(module.metrics, "say_once", lambda text, *a: said.append(text))
    monkeypatch.setattr(
        module.metrics.logger, "warning", lambda text, *args: said.append(text % args)
    )
    return said


def test_the_common_part_is_saved_at_the_end_and_found_by_the_next_engine(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    _ask(first, HOT)
    first.request(list(range(500, 500 + 4 * BLOCK)))  # once is not hot
    first.stop()
    assert _saved(tmp_path) == [HOT]
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    file = SystemKVFile(path)
    for number, name in enumerate(NAMES):
        for found, wanted in zip(file.tensors(name), kv_of(HOT, number), strict=True):
            assert torch.equal(found, wanted)
    assert first.pool.get_num_free_blocks() == 64

    for _ in range(2):  # a second replica, too
        second = Engine(tmp_path)
        assert second.request([*HOT, 1, 2, 3, 4]) == 6  # which compares the content
        assert second.pool.get_num_free_blocks() == 64
        second.stop()  # asked for once: nothing is written, nothing removed
        assert _saved(tmp_path) == [HOT]


def test_a_round_copies_a_little_per_step_and_another_does_not_write_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_COPY_SHARE", 0.0)
    engine = Engine(tmp_path)
    _ask(engine, HOT)
    engine.begin_round()
    steps = 0
    while not hottest_first(tmp_path):
        engine.step()
        steps += 1
        time.sleep(0.001)
    assert steps > len(NAMES) * 6  # one block of one layer at a time
    (path,) = hottest_first(tmp_path)
    before = path.stat()
    while engine.remembering._saving:
        engine.step()
    os.utime(path, (1, 1))
    _round(engine)
    after = path.stat()
    assert after.st_ino == before.st_ino and after.st_mtime > 1  # marked as hot


@pytest.mark.parametrize("how", ["waiting", "preempted", "scarce", "reset"])
def test_held_blocks_are_given_back_when_they_are_wanted(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_COPY_SHARE", 0.0)
    monkeypatch.setattr(writer, "_fingerprint", lambda: None)
    engine = Engine(tmp_path)
    _ask(engine, HOT)
    engine.begin_round()
    for _ in range(3):
        engine.step()
    assert engine.pool.get_num_free_blocks() == 64 - 6
    if how == "waiting":
        engine.remembering.asks(type("Request", (), {"request_id": "w"}))
    elif how == "scarce":
        engine.pool.get_new_blocks(64 - 6 - 3)
    elif how == "reset":
        engine.remembering.before_reset()
        assert engine.pool.reset_prefix_cache()
    assert engine.step(preempted=how == "preempted").drop
    assert engine.pool.get_num_free_blocks() == (9 if how == "scarce" else 64)
    for _ in range(30):
        engine.step()
    assert not hottest_first(tmp_path) and engine.remembering.off is None


def _round(engine: Engine) -> None:
    """A whole round of saving."""
    engine.begin_round()
    _until(lambda: not (engine.step() or engine.remembering._saving))


def _until(done: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if done():
            return
        time.sleep(0.001)
    raise TimeoutError


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_parts_of_two_workers_are_one_file(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_COPY_SHARE", share)
    engine = Engine(tmp_path, workers=2)
    _ask(engine, HOT)
    _round(engine)
    (path,) = hottest_first(tmp_path)
    before = path.stat().st_ino
    _round(engine)  # no part is wanted of what has a file
    assert path.stat().st_ino == before
    _ask(engine, newer := [x + 300 for x in HOT])
    engine.stop()
    assert sorted(_saved(tmp_path)) == [HOT, newer]
    for prompt in (HOT, newer):
        assert Engine(tmp_path).request([*prompt, 1, 2, 3, 4]) == 6  # which compares the content
    assert engine.pool.get_num_free_blocks() == 64
    _until(lambda: len(list(tmp_path.iterdir())) == 2)  # no part is left


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_fails_ends_the_round_of_all_workers(
    rank: int, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    engine = Engine(tmp_path, workers=2)
    broken, copy = engine.savers[rank], saver.Saver._copy

    def fails(self: Any, *args: Any) -> None:
        if self is broken:
            _no_space()
        copy(self, *args)

    _ask(engine, HOT)
    with monkeypatch.context() as patch:
        patch.setattr(saver.Saver, "_copy", fails)
        engine.stop() if stops else _round(engine)
    assert lines == ["system_kv.remember: nothing was saved: [Errno 28] No space left on device"]
    assert engine.pool.get_num_free_blocks() == 64
    if not stops:
        _round(engine)
        assert _saved(tmp_path) == [HOT]


def test_a_late_report_of_an_order_that_was_given_up_releases_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_COPY_SHARE", 0.0)
    engine = Engine(tmp_path)
    _ask(engine, HOT)
    engine.begin_round()
    (first,) = {order.key for _ in range(3) if (order := engine.step()) and order.save}
    engine.remembering.give_back()
    engine.begin_round()
    second = engine.step()
    assert second.drop and second.save and second.key != first
    late = Report(key=first, what="copied", name=second.save.name)
    engine.remembering.reported(late)
    assert engine.pool.get_num_free_blocks() == 64 - 6
    engine.remembering.reported(replace(late, key=second.key))
    assert engine.pool.get_num_free_blocks() == 64


def test_requests_with_a_salt_are_not_saved(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    _ask(engine, HOT, salt="acme")
    engine.stop()
    assert not list(tmp_path.iterdir())


def _serve_after_a_reset(folder: Path, weights: bytes, patch: pytest.MonkeyPatch) -> None:
    """Serve and stop an engine that was loaded with b"old" weights and has these since a reset."""
    patch.setattr(writer, "_fingerprint", lambda: (weights, []))
    engine = Engine(folder)
    engine.writers[0]._weights = b"old", []
    engine.remembering.before_reset()
    _ask(engine, HOT)
    engine.stop()


def test_new_weights_end_it_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    _serve_after_a_reset(tmp_path, b"new", monkeypatch)
    assert not list(tmp_path.iterdir())
    assert lines == [
        "relay: system_kv.remember is off: SystemKVError: the model's weights were changed; "
        "nothing is saved any more"
    ]


def test_the_same_weights_after_a_reset_are_saved_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve_after_a_reset(tmp_path, b"old", monkeypatch)
    assert _saved(tmp_path) == [HOT]


def _no_space(*args: Any, **kwargs: Any) -> int:
    raise OSError(28, "No space left on device")


def _broken(*args: Any, **kwargs: Any) -> int:
    raise RuntimeError("planted\nfailure")


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (_no_space, "nothing was saved: [Errno 28] No space left on device"),
        (_broken, "nothing was saved: RuntimeError: planted failure"),
    ],
)
def test_a_failure_to_write_is_one_line_and_leaves_nothing(
    failure: Callable[..., int],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
) -> None:
    monkeypatch.setattr(saver, "write_file", failure)
    engine = Engine(tmp_path)
    _ask(engine, HOT)
    engine.stop()
    assert lines == [f"system_kv.remember: {line}"]
    assert not list(tmp_path.iterdir()) and engine.pool.get_num_free_blocks() == 64
    assert engine.request([*HOT, 1, 2, 3, 4]) == 6


@pytest.mark.parametrize("damage", ["removed", "cut", "flipped"])
def test_a_file_that_cannot_be_loaded_is_one_line_and_the_request_runs(
    damage: str, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    _ask(engine, HOT)
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
    _ask(first, HOT)
    _round(first)
    (hottest,) = hottest_first(tmp_path)
    _ask(first, longer)
    first.stop()
    os.utime(hottest, (2**31, 2**31))
    assert _saved(tmp_path) == [HOT, longer]
    write, numbers = writer.Writer._write_group, iter(range(2))

    def fails(self: Any, *args: Any) -> int:
        return _broken() if next(numbers) == lost else write(self, *args)

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
    _ask(first, HOT)
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
        _ask(engine, prompt, times)
    engine.stop()
    assert _saved(tmp_path) == [prompts[1], prompts[2], prompts[0]]
    small = Engine(tmp_path, blocks=25)  # 12 blocks are for remembered prefixes
    small.request(list(range(7000, 7000 + 2 * BLOCK)))
    small.request(list(range(8000, 8000 + 12 * BLOCK)))  # evicts the coldest of 12
    assert small.request([*prompts[1], 1, 2, 3, 4]) == 6
    empty = Engine(tmp_path, blocks=25)
    assert empty.request([*prompts[0], 1, 2, 3, 4]) == 0


def test_the_folder_keeps_to_its_size_and_the_coldest_goes(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    _ask(engine, HOT)
    engine.stop()
    (size,) = [path.stat().st_size for path in tmp_path.iterdir()]
    other = tmp_path / "acme.relay"
    other.write_bytes(b"not ours")
    newer = list(range(300, 300 + 6 * BLOCK))
    second = Engine(tmp_path, gib=1.5 * size / 2**30)
    _ask(second, newer)
    second.stop()
    assert _saved(tmp_path) == [newer] and other.exists()
    tiny = Engine(tmp_path, gib=0.1 * size / 2**30)
    _ask(tiny, HOT)
    tiny.stop()
    assert _saved(tmp_path) == [newer]


def _save_for_ever(folder: Path, seed: int, ready: Any) -> None:
    engine = Engine(folder, blocks=512)
    ready.set()
    for number in range(10**6):
        prompt = list(range(seed + 1000 * number, seed + 1000 * number + 20 * BLOCK))
        _ask(engine, prompt)
        engine.begin_round()
        for _ in range(40):
            engine.step()


def test_killed_writers_that_share_a_folder_leave_whole_files(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for kill in range(5):
        running = []
        for seed in (10_000_000, 20_000_000):
            ready = fork.Event()
            running.append(fork.Process(target=_save_for_ever, args=(tmp_path, seed, ready)))
            running[-1].start()
            assert ready.wait(30)
        time.sleep(0.2 + 0.11 * kill)
        for process in running:
            process.kill()
            process.join()
    files = hottest_first(tmp_path)
    for path in files:
        SystemKVFile(path).verify()
    token_ids = list(SystemKVFile(files[0]).manifest.token_ids)
    assert Engine(tmp_path).request([*token_ids, 1, 2, 3, 4]) == 20
