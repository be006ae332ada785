"""Packed segments live only while they are true (contract 2), and within their bound."""

import numpy as np
import pytest
import torch

from vllm_relay.backend.packed_cache import PackedCache, Segment, written_blocks
from vllm_relay.sharing import Choice, Costs, Forest, Group, KernelCosts, StepShape, build_trie
from vllm_relay.sharing import Segment as SegmentOf

NOTHING = np.array([], dtype=np.int64)
BLOCK_SIZE = 4


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def _table(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


def _held(cache: PackedCache) -> list[list[int]]:
    return [segment.block_ids.tolist() for segment in cache]


def _pack(
    cache: PackedCache, *segments: tuple[int, tuple[int, ...]]
) -> list[tuple[Segment, int] | None]:
    """A step of two requests per segment (first column, blocks), all of which are worth packing."""
    rows = len(segments) * 2
    table = np.zeros((rows, 20), dtype=np.int32)
    groups = []
    for index, (start, blocks) in enumerate(segments):
        mine = [2 * index, 2 * index + 1]
        table[mine, start : start + len(blocks)] = blocks
        groups.append(Group(SegmentOf(start, len(blocks)), _ids(*mine)))
    lens = np.full(rows, 20 * BLOCK_SIZE, dtype=np.int32)
    shape = StepShape(build_trie(table, lens, BLOCK_SIZE), BLOCK_SIZE, lens, np.ones_like(lens))
    choice = Choice(
        forest=Forest((tuple(groups),), rows, BLOCK_SIZE), shape=shape, stock=0.0, relay=0.0
    )
    kernel = KernelCosts(read=1.0)
    return cache.of_step(choice, table, Costs(stock=kernel, context=kernel, system=kernel))


def _cache(*segments: tuple[int, ...], max_bytes: int = 1000) -> PackedCache:
    cache = PackedCache(bytes_per_block=10, max_bytes=max_bytes)
    for segment in segments:
        assert _pack(cache, (0, segment)) != [None]
    return cache


def test_a_segment_survives_a_step_that_holds_and_does_not_write_its_blocks() -> None:
    cache = _cache((5, 6))
    before = list(cache)
    cache.begin_step(_table((1, 2, 3), (5, 6, 9)), _ids(3, 2), np.array([9, 3]))
    assert list(cache) == before and cache.find(_ids(5, 6), 0) == (before[0], 0)


def test_a_segment_is_cut_before_a_block_that_is_written() -> None:
    cache = _cache((5, 6, 7))
    cache.begin_step(_table((5, 6, 7, 9)), _ids(3), np.array([9, 6]))
    assert _held(cache) == [[5]]
    cache.begin_step(_table((5, 6, 7, 9)), _ids(3), np.array([5]))
    assert len(cache) == 0


def test_a_segment_is_cut_to_what_some_request_holds_in_order_and_computed() -> None:
    for table, computed, left in (
        (((5, 6, 7), (5, 8, 7)), (2, 3), [5, 6]),
        (((5, 8, 7),), (3,), [5]),
        (((6, 5, 7),), (3,), []),
        (((5, 6, 7),), (1,), [5]),
        (((5,),), (1,), [5]),
    ):
        cache = _cache((5, 6, 7))
        cache.begin_step(_table(*table), _ids(*computed), NOTHING)
        assert _held(cache) == ([left] if left else [])


def test_a_pinned_segment_needs_no_request_and_makes_no_room() -> None:
    cache = PackedCache(bytes_per_block=10, max_bytes=40)
    pinned = cache.pin(_ids(1, 2, 3))
    cache.begin_step(_table((5, 6)), _ids(2), NOTHING)
    assert list(cache) == [pinned] and _held(cache) == [[1, 2, 3]]
    assert _pack(cache, (0, (5, 6))) == [None] and _pack(cache, (0, (5,))) != [None]
    assert cache.find(_ids(1, 2, 3), 0) == (pinned, 0)
    cache.begin_step(_table((5, 6)), _ids(2), np.array([2]))  # written all the same
    assert _held(cache) == [[1], [5]]
    cache.unpin()
    cache.begin_step(_table((5, 6)), _ids(2), NOTHING)
    assert _held(cache) == [[5]]


def test_a_longer_segment_takes_the_place_of_the_pinned_one_in_it_and_leaves_nothing_behind() -> (
    None
):
    cache = PackedCache(bytes_per_block=10, max_bytes=40)
    assert cache.pin(_ids(1, 2, 3)) is not None
    for block in (9, 10, 11):
        assert _pack(cache, (0, (1, 2, 3, block))) != [None]
        assert _held(cache) == [[1, 2, 3, block]] and cache.nbytes == 40
        # Requests of it go on, then end: what is left of it needs a request as any other does.
        cache.begin_step(_table((1, 2, 3, block)), _ids(4), NOTHING)
        cache.begin_step(_table((1, 2, 3, 20)), _ids(4), NOTHING)
        assert _held(cache) == [[1, 2, 3]]
        cache.begin_step(_table((30, 31)), _ids(2), NOTHING)
        assert len(cache) == 0 and cache.nbytes == 0
    again = cache.pin(_ids(1, 2, 3))
    cache.begin_step(_table((30, 31)), _ids(2), NOTHING)
    assert list(cache) == [again]


def test_a_shorter_segment_is_read_in_the_longer_one_and_a_longer_one_replaces_it() -> None:
    cache = _cache((5, 6, 7))
    (segment,) = cache
    assert cache.find(_ids(5, 6), 0) == cache.find(_ids(5, 6, 7), 0) == (segment, 0)
    assert cache.nbytes == 30
    _pack(cache, (0, (5, 6, 7, 8)))
    assert _held(cache) == [[5, 6, 7, 8]] and cache.nbytes == 40
    _pack(cache, (0, (5, 7)))
    assert _held(cache) == [[5, 6, 7, 8], [5, 7]]


def test_segments_are_found_by_column_inside_of_longer_ones() -> None:
    cache = _cache((1, 2, 3, 4))
    (outer,) = cache
    assert cache.find(_ids(3, 4), 2) == (outer, 2)
    assert cache.find(_ids(2), 1) == (outer, 1)
    assert cache.find(_ids(3, 4, 5), 2) is None and cache.find(_ids(9, 4), 2) is None
    # The same ids in other columns are other tokens.
    assert cache.find(_ids(3, 4), 5) is None
    _pack(cache, (5, (3, 4)))
    inner = list(cache)[1]
    # Vouched for by a request that holds them where they were.
    cache.begin_step(_table((8, 8, 8, 8, 8, 3, 4)), _ids(7), NOTHING)
    assert list(cache) == [inner]
    _pack(cache, (4, (2, 3, 4)))
    assert _held(cache) == [[2, 3, 4]]  # it holds what the other held


def test_unused_segments_make_room_and_used_ones_do_not() -> None:
    cache = _cache((1, 2), (3, 4), max_bytes=40)
    used = list(cache)[1]
    found = _pack(cache, (0, (3, 4)), (0, (7, 8)))
    assert found[0] == (used, 0) and _held(cache) == [[3, 4], [7, 8]] and cache.nbytes == 40
    # Whole or not at all.
    found = _pack(cache, (0, (3, 4)), (0, (9, 10, 11)))
    assert found == [(used, 0), None] and _held(cache) == [[3, 4], [7, 8]]


def test_written_blocks_ignores_padding() -> None:
    assert written_blocks(np.array([-1, 0, 129, 130, 511, -1]), 128).tolist() == [0, 1, 1, 3]


def test_a_layer_is_packed_once() -> None:
    (segment,) = _cache((5, 6, 7))
    packed: list[list[int]] = []

    def pack(block_ids: np.ndarray) -> torch.Tensor:
        packed.append(block_ids.tolist())
        return torch.zeros(1)

    first = segment.layer("a", pack)  # type: ignore[arg-type]
    assert segment.layer("a", pack) is first and packed == [[5, 6, 7]]  # type: ignore[arg-type]
    segment.layer("b", pack)  # type: ignore[arg-type]
    assert packed == [[5, 6, 7], [5, 6, 7]]


@pytest.mark.parametrize("max_bytes", [0, 9])
def test_without_room_nothing_is_packed(max_bytes: int) -> None:
    cache = PackedCache(bytes_per_block=10, max_bytes=max_bytes)
    assert cache.pin(_ids(1)) is None and _pack(cache, (0, (5, 6))) == [None]
