"""Hot prefixes are saved, and cost nobody else a block or an answer."""

import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from tests.unit.system_kv.remembering_engine import (
    BLOCK,
    HOT,
    NAMES,
    Engine,
    broken,
    kv_of,
    saved,
    until,
)
from vllm_relay.system_kv import saver, writer
from vllm_relay.system_kv.file import SystemKVFile
from vllm_relay.system_kv.messages import Report
from vllm_relay.system_kv.remembered_files import hottest_first


def test_the_common_part_is_saved_at_the_end_and_found_by_the_next_engine(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.ask(HOT)
    first.request(list(range(500, 500 + 4 * BLOCK)))  # once is not hot
    first.stop()
    assert saved(tmp_path) == [HOT]
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
        assert saved(tmp_path) == [HOT]


def test_a_round_copies_a_little_per_step_and_another_does_not_write_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_COPY_SHARE", 0.0)
    engine = Engine(tmp_path)
    engine.ask(HOT)
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
    engine.save()
    after = path.stat()
    assert after.st_ino == before.st_ino and after.st_mtime > 1  # marked as hot


@pytest.mark.parametrize("how", ["waiting", "preempted", "scarce", "reset"])
def test_held_blocks_are_given_back_when_they_are_wanted(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_COPY_SHARE", 0.0)
    monkeypatch.setattr(writer, "_fingerprint", lambda: None)
    engine = Engine(tmp_path)
    engine.ask(HOT)
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


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_parts_of_two_workers_are_one_file(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_COPY_SHARE", share)
    engine = Engine(tmp_path, workers=2)
    engine.ask(HOT)
    engine.save()
    (path,) = hottest_first(tmp_path)
    before = path.stat().st_ino
    engine.save()  # no part is wanted of what has a file
    assert path.stat().st_ino == before
    engine.ask(newer := [x + 300 for x in HOT])
    engine.stop()
    assert sorted(saved(tmp_path)) == [HOT, newer]
    for prompt in (HOT, newer):
        assert Engine(tmp_path).request([*prompt, 1, 2, 3, 4]) == 6  # which compares the content
    assert engine.pool.get_num_free_blocks() == 64
    until(lambda: len(list(tmp_path.iterdir())) == 2)  # no part is left


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_fails_ends_the_round_of_all_workers(
    rank: int, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    engine = Engine(tmp_path, workers=2)
    failing, copy = engine.savers[rank], saver.Saver._copy

    def fails(self: Any, *args: Any) -> None:
        if self is failing:
            _no_space()
        copy(self, *args)

    engine.ask(HOT)
    with monkeypatch.context() as patch:
        patch.setattr(saver.Saver, "_copy", fails)
        engine.stop() if stops else engine.save()
    assert lines == ["system_kv.remember: nothing was saved: [Errno 28] No space left on device"]
    assert engine.pool.get_num_free_blocks() == 64
    if not stops:
        engine.save()
        assert saved(tmp_path) == [HOT]


def test_a_late_report_of_an_order_that_was_given_up_releases_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_COPY_SHARE", 0.0)
    engine = Engine(tmp_path)
    engine.ask(HOT)
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


def test_a_save_that_is_given_up_while_it_waits_takes_no_memory(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.ask(HOT)
    (one,) = engine.savers
    goes_on = Event()
    one._thread.submit(goes_on.wait)
    engine.begin_round()
    engine.step()
    job = one._job
    engine.remembering.give_back()
    engine.step()
    goes_on.set()
    assert job is not None and job.room.result(30) is None


def test_requests_with_a_salt_are_not_saved(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.ask(HOT, salt="acme")
    engine.stop()
    assert not list(tmp_path.iterdir())


def _serve_after_a_reset(folder: Path, weights: bytes, patch: pytest.MonkeyPatch) -> None:
    """Serve and stop an engine that was loaded with b"old" weights and has these since a reset."""
    patch.setattr(writer, "_fingerprint", lambda: (weights, []))
    engine = Engine(folder)
    engine.writers[0]._weights = b"old", []
    engine.remembering.before_reset()
    engine.ask(HOT)
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
    assert saved(tmp_path) == [HOT]


def _no_space(*args: Any, **kwargs: Any) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (_no_space, "nothing was saved: [Errno 28] No space left on device"),
        (broken, "nothing was saved: RuntimeError: planted failure"),
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
    engine.ask(HOT)
    engine.stop()
    assert lines == [f"system_kv.remember: {line}"]
    assert not list(tmp_path.iterdir()) and engine.pool.get_num_free_blocks() == 64
    assert engine.request([*HOT, 1, 2, 3, 4]) == 6


def test_the_folder_keeps_to_its_size_and_the_coldest_goes(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.ask(HOT)
    engine.stop()
    (size,) = [path.stat().st_size for path in tmp_path.iterdir()]
    other = tmp_path / "acme.relay"
    other.write_bytes(b"not ours")
    newer = list(range(300, 300 + 6 * BLOCK))
    second = Engine(tmp_path, gib=1.5 * size / 2**30)
    second.ask(newer)
    second.stop()
    assert saved(tmp_path) == [newer] and other.exists()
    tiny = Engine(tmp_path, gib=0.1 * size / 2**30)
    tiny.ask(HOT)
    tiny.stop()
    assert saved(tmp_path) == [newer]


def _save_for_ever(folder: Path, seed: int, ready: Any) -> None:
    engine = Engine(folder, blocks=512)
    ready.set()
    for number in range(10**6):
        prompt = list(range(seed + 1000 * number, seed + 1000 * number + 20 * BLOCK))
        engine.ask(prompt)
        engine.begin_round()
        for _ in range(40):
            engine.step()


def test_killed_writers_that_share_a_folder_leave_whole_files(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for kill in range(5):
        running = []
        for seed in (10_000_000, 20_000_000):
            ready = fork.Event()
            process = fork.Process(target=_save_for_ever, args=(tmp_path, seed, ready), daemon=True)
            running.append(process)
            running[-1].start()
            assert ready.wait(30)
        time.sleep(0.2 + 0.11 * kill)
        until(lambda: bool(hottest_first(tmp_path)))  # a slow disk has no whole file yet
        for process in running:
            process.kill()
            process.join()
    files = hottest_first(tmp_path)
    for path in files:
        SystemKVFile(path).verify()
    token_ids = list(SystemKVFile(files[0]).manifest.token_ids)
    assert Engine(tmp_path).request([*token_ids, 1, 2, 3, 4]) == 20
