"""Relayed steps on our own CPU kernels: one call per layer, blocks read where they lie.

System attention, the contexts of all rows, and relay fusion are one call. Segments that have been
packed are read from there, which is faster, all others in the engine's own blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_relay.backend.kv_layout import BlockLayout
from vllm_relay.backend.metadata import Batch, GroupStep, sequences_of
from vllm_relay.backend.packed_cache import SegmentCopies, SegmentCopy
from vllm_relay.backend.packing import Packing
from vllm_relay.ops.attention.native import context_sequences
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.library import Layout
from vllm_relay.ops.native.packed import PackedSegment
from vllm_relay.ops.step.native import StepAttention
from vllm_relay.sharing import Choice, Costs, RelayPlan, make_plan

# Of a group whose segment is not packed: no copy, and none of its blocks.
IN_PLACE = (None, slice(0))


@dataclass(frozen=True)
class NativeStep:
    """The plan of one step, made once and run by every layer.

    Attributes:
        levels: groups in the order of the step, outermost level first; ``copy`` is None where a
            segment is read in place.
        attention: of all tokens of the batch.
    """

    levels: tuple[tuple[GroupStep, ...], ...]
    attention: StepAttention

    def run(
        self,
        layer: Any,
        layout: BlockLayout,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """One layer; query, output ``[T, Hq, D]``, cache ``[blocks, Hkv, block_size, 2 * D]``."""
        cache = layout.for_kernels(kv_cache)
        assert cache is not None  # or the layer would not be served so
        segments = [
            packed(group.copy, layer.layer_name, cache, kv_cache).from_token(
                group.blocks.start * kv_cache.shape[2]
            )
            for level in self.levels
            for group in level
            if group.copy is not None
        ]
        self.attention.run(query, cache, segments, output)


def packed(copy: SegmentCopy, layer: str, cache: Layout, kv_cache: torch.Tensor) -> PackedSegment:
    """A copy as this layer's packed segment; it is packed the first time.

    Args:
        layer: its name. cache: of ``kv_cache [blocks, Hkv, block_size, 2 * D]``.
    """
    _, kv_heads, block_size, width = kv_cache.shape

    def pack() -> PackedSegment:
        blocks, tokens = copy.block_ids, len(copy.block_ids) * block_size
        return PackedSegment(cache, kv_heads, width // 2, kv_cache.dtype, tokens, blocks)

    return copy.layer(layer, pack)


class NativeSteps:
    """Makes them.

    Args:
        block_size: of block tables. impl: the attention of any of the layers. dtype: of KV.
    """

    def __init__(self, block_size: int, impl: Any, dtype: torch.dtype) -> None:
        self.keeping = Packing(block_size)
        self._impl, self._dtype = impl, dtype

    def make(
        self, batch: Batch, choice: Choice, costs: Costs, copies: SegmentCopies
    ) -> tuple[RelayPlan, NativeStep]:
        """Lay out a step of these groups."""
        packed = self.keeping.segments(choice, batch.tables, costs, copies)
        plan = make_plan(choice.forest, batch.tables, batch.lens)
        assert plan is not None  # there are groups
        rows = np.concatenate([plan.rows, batch.loners(plan)])
        levels = [
            [
                None if group < 0 else GroupStep(begin, end, *(of_level[group] or IN_PLACE))
                for begin, end, group in sequences
            ]
            for sequences, of_level in zip(sequences_of(plan, batch.queries), packed, strict=True)
        ]
        return plan, make_step(
            plan, levels, rows, batch.queries[rows], batch.places(rows), self._impl, self._dtype
        )


def make_step(
    plan: RelayPlan,
    levels: Sequence[Sequence[GroupStep | None]],
    rows: NDArray[np.integer[Any]],
    queries: NDArray[np.int32],
    places: torch.Tensor | None,
    impl: Any,
    dtype: torch.dtype,
) -> NativeStep:
    """Lay out a step.

    Args:
        plan: of the step. levels: of each sequence of each level of the plan its group, None for
            gaps.
        rows: of the batch, those of the plan first, in its order. queries: of each of them.
        places: int64, of their query tokens in the batch, None where that is their order.
        impl: the attention of any of the layers.
    """
    starts = np.concatenate([[0], queries.cumsum()])
    tables = np.ascontiguousarray(plan.context_block_table[rows])
    contexts = context_sequences(tables, plan.context_lens[rows], starts)
    contexts[:, native.PARTIAL] = len(levels)
    parts, keep, segments = [], [tables], 0
    for index, (level, groups) in enumerate(zip(plan.levels, levels, strict=True)):
        part = np.zeros((len(groups), native.TABLE + 1), dtype=np.int64)
        bounds = starts[level.cu_rows]
        part[:, native.FIRST] = bounds[:-1]
        part[:, native.QUERIES] = np.diff(bounds)
        part[:, native.KEYS] = level.seq_lens
        part[:, native.PARTIAL] = index
        part[:, native.TABLE] = (
            level.block_table.ctypes.data + np.arange(len(groups)) * (level.block_table.strides[0])
        )
        for sequence, group in zip(part, groups, strict=True):
            if group is not None and group.copy is not None:
                segments += 1
                sequence[native.LAYOUT] = segments
        parts.append(part[[group is not None for group in groups]])
        keep.append(level.block_table)
    attention = StepAttention(
        np.concatenate([*parts, contexts]),
        keep,
        places,
        tokens=int(starts[-1]),
        partials=len(levels) + 1,
        segments=segments,
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        dtype=dtype,
        scale=impl.scale,
    )
    shown = tuple(tuple(group for group in groups if group is not None) for groups in levels)
    return NativeStep(shown, attention)
