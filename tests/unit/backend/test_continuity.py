"""KV that a connector loads between steps: read itself, not a copy of what was there before."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.backend.cpu_bench import Bench, make_bench, make_step, outputs, write
from vllm_relay.backend.continuity import Continuity, continuity
from vllm_relay.backend.packed_cache import PackedCache

DTYPE = torch.float32
QUERY = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1))
TABLES, LENS = [[1, 2, 10], [1, 2, 11], [1, 2, 12]], [70, 80, 90]


class Runner:
    """As vLLM's: a request's block ids in one object, for as long as it holds them."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], req_id_to_index={})

    def step(self, *names: str, resumed: str = "") -> None:
        for name in names:
            if name not in self.requests or name in resumed:
                self.requests[name] = SimpleNamespace(block_ids=([],))
        self.input_batch.req_ids = list(names)


def test_new_and_resumed_requests_are_new_and_those_that_go_on_are_not() -> None:
    runner = Runner()
    follow = Continuity(runner)
    seen = []
    for names, resumed in (("ab", ""), ("ab", ""), ("ba", ""), ("bac", ""), ("bac", "a")):
        runner.step(*names, resumed=resumed)
        runner.requests["b"].block_ids[0].append(7)  # as a request grows
        seen.append(follow.new_rows(len(names)).tolist())
    assert seen == [
        [True] * 2,
        [False] * 2,
        [False] * 2,
        [False, False, True],
        [False, True, False],
    ]
    # Rows of no request; a request that was in no step for a while; one that had ended.
    assert follow.new_rows(4).tolist() == [False, False, False, True]
    runner.step("b")
    assert follow.new_rows(1).tolist() == [False]
    runner.step("a", "b")
    assert follow.new_rows(2).tolist() == [False, False]
    del runner.requests["a"]
    runner.step("b")
    assert follow.new_rows(1).tolist() == [False]
    runner.step("a", "b")
    assert follow.new_rows(2).tolist() == [True, False]


def test_a_runner_that_keeps_its_requests_otherwise_is_not_followed() -> None:
    assert continuity(SimpleNamespace(input_batch=None)) is None
    assert continuity(SimpleNamespace(requests={})) is None
    assert continuity(Runner()) is not None


def test_blocks_that_others_or_system_kvs_hold_are_not_loaded() -> None:
    packed = PackedCache(1, 100)
    packed.pin(np.array([1], np.int32))
    table = np.array([[11, 2, 3, 4], [1, 2, 5, 6], [1, 9, 8, 7]], np.int32)
    new = np.array([False, True, True])
    assert packed.loaded(table, np.array([3, 4, 3]), new).tolist() == [5, 6, 8, 9]


def _load_other_kv(bench: Bench) -> None:
    bench.keys[32:96] += 1.0
    write(bench)


def _error(bench: Bench) -> float:
    relay, _, exact = outputs(bench, make_step(TABLES, LENS), QUERY)
    return float((relay - exact).abs().max())


@pytest.mark.parametrize("followed", [True, False])
def test_kv_loaded_into_blocks_of_a_packed_segment_is_seen(followed: bool) -> None:
    bench, runner = make_bench(4, 2, 64, DTYPE, "vec", 21), Runner()
    packed = bench.plan_by(continuity=Continuity(runner) if followed else None)
    for _ in range(2):
        runner.step("a", "b", "c")
        assert _error(bench) < 1e-4
    assert len(packed) == 1
    segment = next(iter(packed))
    for names in ("abc", "abd"):  # also beside a new one, which found them computed
        runner.step(*names)
        assert _error(bench) < 1e-4
        assert next(iter(packed)) is segment
    # They end. Others are given the same blocks at the same places, and KV is loaded.
    _load_other_kv(bench)
    runner.step("e", "f", "g")
    assert (_error(bench) < 1e-4) is followed
