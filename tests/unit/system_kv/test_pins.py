"""Prefixes pinned by hand: never evicted, bounded, and given back."""

import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from tests.unit.system_kv.remembering_engine import BLOCK, Engine, kv_of
from vllm_relay.system_kv import pins as module
from vllm_relay.system_kv import remembering, saver
from vllm_relay.system_kv.file import SystemKVFile
from vllm_relay.system_kv.pins import LABEL, Pins, answer
from vllm_relay.system_kv.remembered_files import hottest_first

PROMPT = list(range(100, 100 + 6 * BLOCK + 1))  # one token more than whole blocks
PIN = {"pin": True}


def _pin(engine: Engine, prompt: list[int] = PROMPT, salt: str | None = None) -> dict[str, Any]:
    engine.request(prompt, salt, PIN)
    pinned: dict[str, Any] = engine.answer["pinned"]
    return pinned


def _flood(engine: Engine, start: int = 1000, requests: int = 20) -> None:
    """Cold requests of more than the pool."""
    for i in range(requests):
        begin = start + 100 * i
        engine.request(list(range(begin, begin + 8 * BLOCK)))


def test_a_pinned_prompt_outlives_cold_traffic_until_it_is_unpinned(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    pinned = _pin(engine)
    expected = {"tokens": 6 * BLOCK, "blocks": 6, "requests_hit": 0, "tokens_hit": 0}
    assert pinned == {"label": pinned["label"], **expected} and len(pinned["label"]) == 8
    _flood(engine)
    assert engine.request(PROMPT) == 6
    engine.request([1, 2], command={"list": True})
    hit = {**pinned, "requests_hit": 1, "tokens_hit": 6 * BLOCK}
    assert engine.answer == {"pins": [hit]}
    counted = {"requests_hit": 1, "tokens_hit": 6 * BLOCK, "blocks": 6}
    assert engine.pins.counts() == {LABEL: counted}
    assert engine.pool.get_num_free_blocks() == 64 - 6

    engine.request([1, 2], command={"unpin": pinned["label"]})
    assert engine.answer == {"unpinned": hit}
    assert engine.pool.get_num_free_blocks() == 64
    _flood(engine, 9000)
    assert engine.request(PROMPT) == 0
    assert engine.pins.counts() == {LABEL: {**counted, "blocks": 0}}


def test_a_prompt_is_pinned_once_and_common_blocks_count_once(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    first = _pin(engine)
    assert _pin(engine)["label"] == first["label"]
    longer = _pin(engine, [*PROMPT, *range(500, 500 + 2 * BLOCK)])
    assert longer["blocks"] == 8 and engine.pool.get_num_free_blocks() == 64 - 8
    assert _pin(engine, salt="acme")["label"] != first["label"]
    assert engine.pool.get_num_free_blocks() == 64 - 14
    for label in (first["label"], longer["label"]):
        engine.request([1, 2], command={"unpin": label})
    assert engine.pool.get_num_free_blocks() == 64 - 6


def test_pins_leave_room_for_the_longest_request(tmp_path: Path) -> None:
    engine = Engine(tmp_path)  # half of 64 blocks may be pinned
    for i in range(5):
        _pin(engine, [i, *PROMPT[1:]])
    engine.request([9, *PROMPT[1:]], command=PIN)
    assert "need 36 of 64 KV cache blocks (56%)" in engine.answer["error"]
    assert engine.pool.get_num_free_blocks() == 64 - 30
    engine.pins = Pins(block_size=BLOCK, budget=0, max_model_len=64, longest=16, saved=None)
    engine.pins.attach(engine.pool, set)
    engine.request(PROMPT, command=PIN)
    assert "system_kv.budget allows 0%, 0 blocks" in engine.answer["error"]
    narrow = Pins(block_size=BLOCK, budget=1.0, max_model_len=256, longest=59, saved=None)
    narrow.attach(engine.pool, set)
    engine.pins = narrow
    engine.request(PROMPT, command=PIN)
    assert "cannot hold one request of max_model_len 256" in engine.answer["error"]


@pytest.mark.parametrize(
    ("command", "prompt", "said"),
    [
        ({"pin": True}, [1, 2, 3], "has 3 tokens, less than one KV block of 4"),
        ({"unpin": "nobody"}, PROMPT, "no pin 'nobody'"),
        ({"pin": "yes"}, PROMPT, "must be"),
        ({"pin": True, "unpin": "x"}, PROMPT, "must be"),
        ("pin", PROMPT, "must be"),
    ],
)
def test_a_bad_command_is_one_line(
    command: Any, prompt: list[int], said: str, tmp_path: Path
) -> None:
    engine = Engine(tmp_path)
    engine.request(prompt, command=command)
    assert said in engine.answer["error"] and "\n" not in engine.answer["error"]
    assert engine.pool.get_num_free_blocks() == 64


def _finished(**more: Any) -> Any:
    given = {
        "kv_transfer_params": {"relay": PIN},
        "prompt_token_ids": PROMPT,
        "prompt_embeds": None,
        "mm_features": [],
        "status": RequestStatus.FINISHED_LENGTH_CAPPED,
    }
    return SimpleNamespace(**given | more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"prompt_token_ids": None}, "only prompts of tokens can be pinned"),
        ({"prompt_embeds": "a tensor"}, "only prompts of tokens can be pinned"),
        ({"mm_features": ["image"]}, "prompts with images, audio or video cannot be pinned"),
        ({"status": RequestStatus.FINISHED_ABORTED}, "the request was aborted"),
    ],
)
def test_what_cannot_be_pinned_is_refused(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert Engine(tmp_path).pins.answer(_finished(**more)) == {"error": said}


def test_blocks_without_a_hash_of_their_own_are_not_pinned(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.pool.hash_block_size = 2 * BLOCK  # under decode context parallelism
    assert "have no hash of their own" in engine.pins.answer(_finished())["error"]


def test_so_many_prompts_are_pinned_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST", 2)
    engine = Engine(tmp_path)
    for end in (2, 4):
        _pin(engine, PROMPT[: end * BLOCK])
    engine.request(PROMPT, command=PIN)
    assert engine.answer == {"error": "2 prompts are pinned, which is the most: unpin one"}
    assert _pin(engine, PROMPT[: 2 * BLOCK])["blocks"] == 2  # once more


def test_a_request_without_a_command_or_an_engine_without_pins() -> None:
    assert answer(None, _finished(kv_transfer_params=None)) is None
    assert answer(None, _finished(kv_transfer_params={"do_remote_decode": True})) is None
    found = answer(None, _finished())
    assert found is not None and "needs system_kv.pins" in found["relay"]["error"]


def test_a_reset_gives_pins_up_and_needs_no_other_call(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    _pin(engine)
    running = engine.pool.get_new_blocks(1)
    assert not engine.pool.reset_prefix_cache()  # a request runs: they stay
    assert len(engine.pins.prefixes()) == 1
    engine.pool.free_blocks(running)
    assert engine.pool.reset_prefix_cache()
    assert engine.pool.get_num_free_blocks() == 64 and not engine.pins.prefixes()
    assert engine.request(PROMPT) == 0


def test_a_pin_under_a_file_counts_common_blocks_once_and_lets_the_cache_be_reset(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path, pinned=PROMPT[: 4 * BLOCK])
    for layer, kept in enumerate(engine.layers[0]):
        keys, values = kv_of(PROMPT[: 4 * BLOCK], layer)
        slots = torch.arange(BLOCK, 5 * BLOCK)
        kept.do_kv_cache_update(kept, keys, values, kept.kv_cache, slots)
    assert _pin(engine)["blocks"] == 6
    assert engine.pool.get_num_free_blocks() == 64 - 6
    for i in range(4):
        _pin(engine, [i, *PROMPT[1:]])
    engine.request([9, *PROMPT[1:]], command=PIN)
    assert "need 36 of 64 KV cache blocks" in engine.answer["error"]
    assert engine.pool.reset_prefix_cache()
    assert engine.pool.get_num_free_blocks() == 64 - 4 and not engine.pins.prefixes()


def test_the_gauge_falls_to_nothing_after_an_unpin_without_a_hit(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    assert engine.pins.counts() == {}
    engine.request([1, 2], command={"unpin": _pin(engine)["label"]})
    assert engine.pins.counts() == {LABEL: {"requests_hit": 0, "tokens_hit": 0, "blocks": 0}}


def test_save_writes_pins_and_hot_prefixes_and_waits_for_them(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    _pin(engine)
    _pin(engine, [7, *PROMPT], salt="acme")
    hot = list(range(700, 700 + 4 * BLOCK))
    for i in range(4):
        engine.request([*hot, *range(1000 * i, 1000 * i + 2 * BLOCK)])
    engine.request([1, 2], command={"save": True})
    names = engine.answer["saved"]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    saved = [list(SystemKVFile(path).manifest.token_ids) for path in hottest_first(tmp_path)]
    assert saved == [PROMPT[:-1], hot]
    engine.request([1, 2], command={"save": True})  # they are there
    assert engine.answer["saved"] == names
    second = Engine(tmp_path)
    assert second.request(PROMPT) == 6


def test_two_saves_at_a_time_have_an_answer_each(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    _pin(engine)
    first, second = (SimpleNamespace(request_id=name) for name in "ab")
    side = engine.remembering
    assert side.saves(first)
    engine.step()
    assert side.saves(second)  # comes while the round of the first is under way
    while side.saves(first):
        engine.step()
    engine.step()  # begins the round of the second
    names = side.saved()
    assert len(names) == 1
    while side.saves(second):
        engine.step()
    assert side.saved() == names


def test_a_round_that_ends_early_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path, most_saved=7)
    _pin(engine)
    _pin(engine, [7, *PROMPT])
    engine.request([1, 2], command={"save": True})
    assert engine.answer == {
        "error": "1 files were saved; 1 pinned prefixes do not fit into remember_gib"
    }
    assert len(hottest_first(tmp_path)) == 1

    def fail(*args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver, "write_file", fail)
    other = Engine(tmp_path)
    _pin(other, [8, *PROMPT])
    other.request([1, 2], command={"save": True})
    assert other.answer == {"error": "0 files were saved; [Errno 28] No space left on device"}
    monkeypatch.setattr(remembering, "_STOP_SECONDS", 0.0)
    other.request([1, 2], command={"save": True})
    assert other.answer["error"].startswith("0 files were saved; ")


@pytest.mark.parametrize(("seconds", "files"), [(40.0, 2), (70.0, 0)])
def test_save_waits_as_long_as_each_file_comes_in_a_minute(
    seconds: float, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, write, given_back = [0.0], saver.write_file, Event()

    def slow(*args: Any, **kwargs: Any) -> int:
        clock[0] += seconds
        assert files or given_back.wait(30)
        return write(*args, **kwargs)

    monkeypatch.setattr(saver, "write_file", slow)
    monkeypatch.setattr(
        remembering, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time)
    )
    engine = Engine(tmp_path)
    give_back = engine.remembering.give_back
    monkeypatch.setattr(
        engine.remembering, "give_back", lambda *why: (give_back(*why), given_back.set())
    )
    for number in (8, 9):
        _pin(engine, [number, *PROMPT])
    engine.request([1, 2], command={"save": True})
    if files:
        assert len(engine.answer["saved"]) == files
    else:
        assert engine.answer == {"error": "0 files were saved; the next took more than 60 s"}


def test_save_needs_a_folder_and_ends_where_saving_has_failed(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.remembering.off = "no space left"
    engine.request([1, 2], command={"save": True})
    assert "system_kv.remember is off: no space left" in engine.answer["error"]
    engine.pins = Pins(block_size=BLOCK, budget=0.5, max_model_len=64, longest=16, saved=None)
    engine.request([1, 2], command={"save": True})
    assert "start with system_kv.remember" in engine.answer["error"]
