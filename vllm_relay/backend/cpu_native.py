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

from vllm_relay.backend.layout import BlockLayout
from vllm_relay.backend.metadata import GroupStep
from vllm_relay.ops.cpu import native
from vllm_relay.ops.cpu.attention import context_sequences
from vllm_relay.ops.cpu.packed import PackedSegment
from vllm_relay.ops.cpu.step import StepAttention
from vllm_relay.sharing import RelayPlan


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
        block_size, head_size = kv_cache.shape[2], kv_cache.shape[3] // 2
        segments = []
        for level in self.levels:
            for group in level:
                copy = group.copy
                if copy is None:
                    continue

                def pack(blocks: NDArray[np.int32] = copy.block_ids) -> PackedSegment:
                    return PackedSegment(
                        cache,
                        kv_cache.shape[1],
                        head_size,
                        kv_cache.dtype,
                        len(blocks) * block_size,
                        blocks,
                    )

                packed = copy.layer(layer.layer_name, pack)
                segments.append(packed.from_token(group.blocks.start * block_size))
        self.attention.run(query, cache, segments, output)


def make_step(
    plan: RelayPlan,
    levels: Sequence[Sequence[GroupStep | None]],
    rows: NDArray[np.integer[Any]],
    queries: NDArray[np.int32],
    places: NDArray[np.int64] | None,
    impl: Any,
    dtype: torch.dtype,
) -> NativeStep:
    """Lay out a step.

    Args:
        plan: of the step. levels: of each sequence of each level of the plan its group, None for
            gaps.
        rows: of the batch, those of the plan first, in its order. queries: of each of them.
        places: of their query tokens in the batch, None where that is the order of the batch.
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
        None if places is None else torch.from_numpy(places),
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
