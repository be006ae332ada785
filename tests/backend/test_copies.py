"""Copies of shared segments live only while they are true (contract 2), and within their bound."""

import numpy as np
import torch

from vllm_relay.backend.copies import SegmentCopies, written_blocks

NOTHING = np.array([], dtype=np.int64)


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def _table(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


def _copies(*segments: tuple[int, ...], max_bytes: int = 1000) -> SegmentCopies:
    copies = SegmentCopies(bytes_per_block=10, max_bytes=max_bytes)
    for segment in segments:
        assert copies.get(_ids(*segment)) is not None
    return copies


def test_a_copy_survives_a_step_that_holds_and_does_not_write_its_blocks() -> None:
    copies = _copies((5, 6))
    before = copies.get(_ids(5, 6))
    copies.begin_step(_table((1, 2, 3), (5, 6, 9)), np.array([3, 2]), np.array([9, 3]))
    assert copies.get(_ids(5, 6)) is before


def test_a_copy_dies_when_one_of_its_blocks_is_written() -> None:
    copies = _copies((5, 6))
    copies.begin_step(_table((5, 6, 9)), np.array([2]), np.array([9, 6]))
    assert len(copies) == 0


def test_a_copy_dies_when_no_row_holds_its_blocks_in_order_and_computed() -> None:
    for table, computed in (
        (_table((5, 7, 9)), 3),
        (_table((6, 5, 9)), 3),
        (_table((5, 6, 9)), 1),
        (_table((5,)), 1),
    ):
        copies = _copies((5, 6))
        copies.begin_step(table, np.array([computed]), NOTHING)
        assert len(copies) == 0


def test_a_shorter_segment_uses_the_longer_copy_and_a_longer_one_replaces_it() -> None:
    copies = _copies((5, 6, 7))
    assert copies.get(_ids(5, 6)) is copies.get(_ids(5, 6, 7))
    assert copies.nbytes == 30
    assert copies.get(_ids(5, 6, 7, 8)) is not None
    assert (len(copies), copies.nbytes) == (1, 40)
    assert copies.get(_ids(5, 7)) is not None
    assert len(copies) == 2


def test_the_bound_holds_and_a_refused_copy_costs_nothing() -> None:
    copies = _copies((1, 2), max_bytes=40)
    assert copies.get(_ids(3, 4, 5)) is None
    assert copies.nbytes == 20
    assert copies.get(_ids(3, 4)) is not None
    # growing (1, 2) to three blocks would need 30 beside the 20 of (3, 4)
    assert copies.get(_ids(1, 2, 9)) is None
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
    segment = _copies((5, 6, 7)).get(_ids(5, 6))
    assert segment is not None
    keys, values = segment.layer("a", cache, layout, 2)  # type: ignore[arg-type]
    assert keys.shape == values.shape == (8, 2, 3)
    rows = cache.view(10, 2, 2, 4, 3)
    assert torch.equal(keys[4:].transpose(0, 1), rows[6, :, 0])
    assert torch.equal(values[:4].transpose(0, 1), rows[5, :, 1])
    again, _ = segment.layer("a", cache, layout, 3)  # type: ignore[arg-type]
    assert again.data_ptr() == keys.data_ptr() and layout.calls == 1
    segment.layer("b", cache, layout, 1)  # type: ignore[arg-type]
    assert layout.calls == 2
