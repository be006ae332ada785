"""Copies of shared segments live only while they are true (contract 2), and within their bound."""

import numpy as np
import pytest
import torch

from vllm_relay.backend.packed_cache import SegmentCopies, written_blocks

NOTHING = np.array([], dtype=np.int64)


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def _table(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


def _copies(*segments: tuple[int, ...], max_bytes: int = 1000) -> SegmentCopies:
    copies = SegmentCopies(bytes_per_block=10, max_bytes=max_bytes)
    for segment in segments:
        assert copies.get(_ids(*segment), 0) is not None
    return copies


def test_a_copy_survives_a_step_that_holds_and_does_not_write_its_blocks() -> None:
    copies = _copies((5, 6))
    before = list(copies)
    copies.begin_step(_table((1, 2, 3), (5, 6, 9)), np.array([3, 2]), np.array([9, 3]))
    assert list(copies) == before and copies.get(_ids(5, 6), 0) == (before[0], slice(0, 2))


def test_a_copy_is_cut_before_a_block_that_is_written() -> None:
    copies = _copies((5, 6, 7))
    copies.begin_step(_table((5, 6, 7, 9)), np.array([3]), np.array([9, 6]))
    assert [c.block_ids.tolist() for c in copies] == [[5]]
    copies.begin_step(_table((5, 6, 7, 9)), np.array([3]), np.array([5]))
    assert len(copies) == 0


def test_a_copy_is_cut_to_what_some_row_holds_in_order_and_computed() -> None:
    for table, computed, left in (
        (((5, 6, 7), (5, 8, 7)), (2, 3), [5, 6]),
        (((5, 8, 7),), (3,), [5]),
        (((6, 5, 7),), (3,), []),
        (((5, 6, 7),), (1,), [5]),
        (((5,),), (1,), [5]),
    ):
        copies = _copies((5, 6, 7))
        copies.begin_step(_table(*table), np.array(computed), NOTHING)
        assert [c.block_ids.tolist() for c in copies] == ([left] if left else [])


def _pinned(*ids: int, max_bytes: int) -> SegmentCopies:
    copies = SegmentCopies(bytes_per_block=10, max_bytes=max_bytes)
    copies.lasting.update(ids)
    assert copies.get(_ids(*ids), 0) is not None
    return copies


def test_a_copy_of_a_pinned_system_kv_needs_no_row_and_makes_no_room() -> None:
    copies = _pinned(1, 2, 3, max_bytes=40)
    (copy,) = copies
    copies.begin_step(_table((5, 6)), np.array([2]), NOTHING)
    assert list(copies) == [copy] and copy.block_ids.tolist() == [1, 2, 3]
    assert copies.to_make(_ids(5, 6), 0) == 1
    assert copies.get(_ids(5, 6), 0) == (list(copies)[1], slice(0, 1))
    assert copies.find(_ids(1, 2, 3), 0) == (copy, slice(0, 3))
    copies.begin_step(_table((5, 6)), np.array([2]), np.array([2]))  # written all the same
    assert copy.block_ids.tolist() == [1]
    copies.lasting.clear()  # no longer pinned
    copies.begin_step(_table((5, 6)), np.array([2]), NOTHING)
    assert [c.block_ids.tolist() for c in copies] == [[5]]


def test_a_longer_copy_takes_the_place_of_the_pinned_one_in_it_and_leaves_nothing_behind() -> None:
    copies = _pinned(1, 2, 3, max_bytes=40)
    for block in (9, 10, 11):
        longer, _ = copies.get(_ids(1, 2, 3, block), 0) or pytest.fail("no room")
        assert list(copies) == [longer] and copies.nbytes == 40
        # rows of it go on, then end: what is left of it needs a row as any other copy does
        copies.begin_step(_table((1, 2, 3, block)), np.array([4]), NOTHING)
        copies.begin_step(_table((1, 2, 3, 20)), np.array([4]), NOTHING)
        assert [c.block_ids.tolist() for c in copies] == [[1, 2, 3]]
        copies.begin_step(_table((30, 31)), np.array([2]), NOTHING)
        assert len(copies) == 0 and copies.nbytes == 0
    again, _ = copies.get(_ids(1, 2, 3), 0) or pytest.fail("no room")
    copies.begin_step(_table((30, 31)), np.array([2]), NOTHING)
    assert list(copies) == [again]


def test_a_shorter_segment_uses_the_longer_copy_and_a_longer_one_replaces_it() -> None:
    copies = _copies((5, 6, 7))
    (copy,) = copies
    assert copies.get(_ids(5, 6), 0) == (copy, slice(0, 2))
    assert copies.get(_ids(5, 6, 7), 0) == (copy, slice(0, 3))
    assert copies.nbytes == 30
    longer, blocks = copies.get(_ids(5, 6, 7, 8), 0) or pytest.fail("no copy")
    assert (len(copies), copies.nbytes, blocks) == (1, 40, slice(0, 4))
    other, blocks = copies.get(_ids(5, 7), 0) or pytest.fail("no copy")
    assert list(copies) == [longer, other] and other.block_ids.tolist() == [5, 7]
    assert blocks == slice(0, 2)


def test_segments_are_found_by_column_inside_of_longer_copies() -> None:
    copies = SegmentCopies(bytes_per_block=10, max_bytes=1000)
    outer, _ = copies.get(_ids(1, 2, 3, 4), 0) or pytest.fail("no copy")
    assert copies.get(_ids(3, 4), 2) == (outer, slice(2, 4))
    assert copies.get(_ids(2), 1) == (outer, slice(1, 2))
    assert copies.to_make(_ids(3, 4), 2) == 0
    assert copies.to_make(_ids(3, 4, 5), 2) == 3 and copies.to_make(_ids(9, 4), 2) == 2
    assert copies.get(_ids(9, 4), 2, make=False) is None and len(copies) == 1
    # the same ids in other columns are other tokens
    inner, blocks = copies.get(_ids(3, 4), 5) or pytest.fail("no copy")
    assert inner is not outer and blocks == slice(0, 2)
    # vouched for by a row that holds them where they were
    copies.begin_step(_table((8, 8, 8, 8, 8, 3, 4)), np.array([7]), NOTHING)
    assert list(copies) == [inner]
    longer, _ = copies.get(_ids(2, 3, 4), 4) or pytest.fail("no copy")
    assert list(copies) == [longer]  # it holds what the other held


def test_what_no_group_uses_makes_room_and_what_one_uses_does_not() -> None:
    copies = _copies((1, 2), (3, 4), max_bytes=40)
    used, _ = copies.get(_ids(3, 4), 0) or pytest.fail("no copy")
    new, blocks = copies.get(_ids(7, 8, 9), 0, in_use=[used]) or pytest.fail("no copy")
    # as many as fit beside what is in use
    assert (new.block_ids.tolist(), blocks) == ([7, 8], slice(0, 2))
    assert list(copies) == [used, new] and copies.nbytes == 40
    assert copies.get(_ids(1, 2), 0, in_use=[used, new]) is None
    # a copy that begins alike serves as far as it is alike, and no further
    assert copies.get(_ids(3, 9), 0, in_use=[used, new]) == (used, slice(0, 1))
    assert copies.nbytes == 40


def test_written_blocks_ignores_padding() -> None:
    assert written_blocks(np.array([-1, 0, 129, 130, 511, -1]), 128).tolist() == [0, 1, 3]


class _RowMajor:
    """A layout whose blocks are K rows, then V rows."""

    calls = 0

    def copy_rows(
        self, kv_cache: torch.Tensor, ids: list[int], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        self.calls += 1
        heads, block, dim = kv_cache.shape[1], kv_cache.shape[2], kv_cache.shape[3] // 2
        both = kv_cache[ids].view(len(ids), heads, 2, block, dim).transpose(0, 1)
        keys.copy_(both[:, :, 0].reshape(heads, -1, dim))
        values.copy_(both[:, :, 1].reshape(heads, -1, dim))


def test_a_layer_is_copied_once_and_sliced_for_shorter_segments() -> None:
    cache = torch.randn(10, 2, 4, 6)
    layout = _RowMajor()
    (segment,) = _copies((5, 6, 7))
    keys, values = segment.rows("a", cache, layout, slice(0, 2))  # type: ignore[arg-type]
    assert keys.shape == values.shape == (8, 2, 3)
    rows = cache.view(10, 2, 2, 4, 3)
    assert torch.equal(keys[4:].transpose(0, 1), rows[6, :, 0])
    assert torch.equal(values[:4].transpose(0, 1), rows[5, :, 1])
    again, _ = segment.rows("a", cache, layout, slice(0, 3))  # type: ignore[arg-type]
    assert again.data_ptr() == keys.data_ptr() and layout.calls == 1
    later, _ = segment.rows("a", cache, layout, slice(1, 3))  # type: ignore[arg-type]
    assert torch.equal(later[:4].transpose(0, 1), rows[6, :, 0])
    segment.rows("b", cache, layout, slice(0, 1))  # type: ignore[arg-type]
    assert layout.calls == 2
