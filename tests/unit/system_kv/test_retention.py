"""Retention on vLLM's real BlockPool: same free blocks in another order, and more of them hit."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from tests.unit.system_kv.pool_traffic import Prompt, Traffic, chain, conversations, tenants
from vllm_relay.system_kv import retention as module
from vllm_relay.system_kv.hotness import Hotness

ANOTHER = st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 4))


def _hits(trace: Iterable[Prompt], learn: bool, blocks: int = 100, **more: Any) -> int:
    traffic = Traffic(blocks, learn, **more)
    for prompt in trace:
        traffic.finish(traffic.admit(prompt))
    assert traffic.retention is None or traffic.retention.off is None
    return traffic.hits


def _spare_always(traffic: Traffic) -> None:
    """Leave the trial out, which has no winner in short traces."""
    assert traffic.retention is not None
    traffic.retention._trial = _Won()


class _Won:
    sparing_wins = True

    def ask(self, hashes: Prompt) -> None:
        pass


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ANOTHER, st.booleans()), max_size=60), st.sampled_from([1, 2]))
def test_the_same_blocks_are_free_and_no_block_in_use_is_touched(
    requests: list[tuple[tuple[int, int, int], bool]], groups: int
) -> None:
    """Each pass over the queue changes its order at most."""
    traffic = Traffic(64, learn=True, groups=groups)
    _spare_always(traffic)
    assert traffic.retention is not None
    running: list[list[Any]] = []
    for i, ((tenant, shared, own), stays) in enumerate(requests):
        blocks = traffic.admit(chain((f"tenant {tenant}", shared), (f"own {i}", own)))
        running.append(blocks)
        if not stays or len(running) > 1:
            traffic.finish(running.pop(0))
        before = traffic.free_ids()
        counts = [(b.ref_cnt, b.block_hash) for b in traffic.pool.blocks]
        traffic.retention.spare(1 + i % 40)
        after = traffic.free_ids()
        assert sorted(after) == sorted(before)
        assert traffic.pool.get_num_free_blocks() == len(after) == len(set(after))
        assert counts == [(b.ref_cnt, b.block_hash) for b in traffic.pool.blocks]
        used = {block.block_id for blocks in running for block in blocks}
        assert not used & set(after)
        # Cold blocks keep their order among themselves, so vLLM's least recent goes first.
        cold = {b.block_id for b in traffic.pool.blocks if not traffic.retention._is_hot(b)}
        assert [x for x in before if x in cold] == [x for x in after if x in cold]
    assert traffic.retention.off is None
    for blocks in running:
        traffic.finish(blocks)
    assert traffic.pool.get_num_free_blocks() == 64
    assert len(traffic.pool.get_new_blocks(64)) == 64  # nothing is kept from a request


def test_a_hot_prefix_outlives_cold_traffic_of_many_times_the_pool() -> None:
    traffic = Traffic(64, learn=True)
    hot = chain(("acme", 12))
    _spare_always(traffic)
    for i in range(8):
        traffic.finish(traffic.admit([*hot, *chain((f"hot {i}", 2))]))
    found = traffic.hits
    for i in range(40):
        traffic.finish(traffic.admit(chain((f"cold {i}", 30))))
    traffic.finish(traffic.admit(hot))
    assert traffic.hits == found + len(hot)


def test_one_of_several_copies_is_kept() -> None:
    traffic = Traffic(64, learn=True)
    _spare_always(traffic)
    hot = chain(("acme", 4))
    pool = traffic.pool
    for _ in range(5):  # at the same time: nobody finds the other's
        request: Any = type("Request", (), {"block_hashes": hot})
        blocks = pool.get_new_blocks(4)
        pool.cache_full_blocks(request, blocks, 0, 4, 16, 0)
        traffic.finish(blocks)
        assert traffic.retention is not None
        traffic.retention.ask(hot)
    for i in range(10):
        traffic.finish(traffic.admit(chain((f"cold {i}", 30))))
    kept = [b for b in pool.blocks if b.block_hash and b.block_hash[:-4] in hot]
    assert len(kept) == 4 and pool.get_cached_block(hot[-1], [0])


def test_moves_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOVES_PER_STEP", 3)
    moves = 0
    append = FreeKVCacheBlockQueue.append

    def counted(queue: Any, block: Any) -> None:
        nonlocal moves
        moves += 1
        append(queue, block)

    monkeypatch.setattr(FreeKVCacheBlockQueue, "append", counted)
    traffic = Traffic(64, learn=True)
    _spare_always(traffic)
    assert traffic.retention is not None
    for _ in range(8):
        traffic.finish(traffic.admit(chain(("acme", 20))))
    traffic.finish(traffic.admit(chain(("cold", 44))))
    moves = 0
    traffic.retention.begin_step()
    traffic.retention.spare(10)
    traffic.retention.spare(10)
    assert moves == 3


TRACES: dict[str, Callable[[], Iterable[Prompt]]] = {
    "fixed": lambda: tenants(1500, None, seed=1),
    "shifting": lambda: tenants(1500, 300, seed=2),
}


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("groups", [1, 2])
def test_tenants_hit_more_than_under_lru(trace: str, groups: int) -> None:
    requests = list(TRACES[trace]())
    stock, ours = (_hits(requests, learn, 100 * groups, groups=groups) for learn in (False, True))
    assert ours > 1.03 * stock


@pytest.mark.parametrize("trace", TRACES)
def test_the_reversed_order_hits_less_than_lru(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted error: the cold ones are spared. The tests above then fail."""
    requests = list(TRACES[trace]())
    is_hot = Hotness.is_hot
    monkeypatch.setattr(Hotness, "is_hot", lambda self, name: not is_hot(self, name))
    monkeypatch.setattr(module.EvictionTrial, "sparing_wins", True)
    assert _hits(requests, learn=True) < _hits(requests, learn=False)


def test_where_nothing_comes_again_nothing_is_lost() -> None:
    requests = list(conversations(1500, seed=3))
    assert _hits(requests, learn=True) >= 0.99 * _hits(requests, learn=False)
    once = [chain((f"own {i}", 10)) for i in range(300)]
    assert _hits(once, learn=True) == _hits(once, learn=False) == 0


def test_without_the_trial_conversations_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted error: the test above depends on the trial."""
    requests = list(conversations(1500, seed=3))
    monkeypatch.setattr(module.EvictionTrial, "sparing_wins", True)
    assert _hits(requests, learn=True) < 0.97 * _hits(requests, learn=False)


@pytest.mark.parametrize("place", ["ask", "spare"])
def test_a_failure_ends_it_with_one_line_and_the_engine_serves(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        module.metrics.logger, "warning", lambda text, *args: lines.append(text % args)
    )
    counted: list[str] = []
    monkeypatch.setattr(module.metrics, "count_fallback", counted.append)
    requests = list(tenants(60, None, seed=4))
    traffic = Traffic(64, learn=True)
    _spare_always(traffic)

    def fail(self: Hotness, name: Any) -> Any:
        raise RuntimeError("planted\nfailure")

    monkeypatch.setattr(Hotness, "ask" if place == "ask" else "is_hot", fail)
    for prompt in requests:
        traffic.finish(traffic.admit(prompt))
    assert traffic.hits == _hits(requests, learn=False, blocks=64)
    assert lines == [
        "relay: system_kv.learn is off: RuntimeError: planted failure; the KV cache evicts as "
        "without it"
    ]
    assert counted == ["learning"]


def test_a_pool_of_another_form_is_refused_and_left_as_it_is() -> None:
    class Pool:
        blocks, hash_block_size = (1, 2), 16

    pool: Any = Pool()
    retention = module.Retention()
    retention.attach(pool, 1, [16])
    assert retention.off is not None and "free_block_queue" in retention.off
    assert vars(pool) == {}  # nothing was wrapped
    retention.ask(chain(("acme", 1)))
    retention.begin_step()
