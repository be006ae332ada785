"""One step's relay attention on the CPU kernels: laid out once, run by every layer.

All levels and contexts are one call: its work is divided among the threads as a whole, and the
partials are fused where they belong. No tensor is gathered or allocated per layer.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.prepared import AttentionShape, PreparedAttention
from vllm_relay.plan import Part, Plan


class NativeStep:
    """The layout of a step for the kernels, and of later ones that differ in their contexts only.

    Args:
        plan: levels and context. packed: per group, level by level, whether it is read from a
            packed segment; else from the KV cache.
        shape: of the layers' attention.

    Attributes:
        plan: of the step that runs next.
    """

    def __init__(
        self,
        plan: Plan[NDArray[np.int32]],
        packed: Sequence[bool],
        shape: AttentionShape,
    ) -> None:
        order, places = _order(plan.index)
        tokens, partials = len(order), len(plan.levels) + 1
        parts = [sequences_of(x, partial=i) for i, x in enumerate((*plan.levels, plan.context))]
        # The context's tokens are in the order of the batch, the step's in that of the groups.
        context = parts[-1]
        context[:, native.FIRST] = np.append(places, tokens)[context[:, native.FIRST]]
        sequences = np.concatenate(parts)
        sequences = sequences[(sequences[:, native.KEYS] > 0) | (sequences[:, native.CAUSAL] > 0)]
        # Layout 0 is the KV cache, the others are packed segments.
        layouts = np.cumsum(packed) * np.array(packed, dtype=np.int64)
        sequences[: len(layouts), native.LAYOUT] = layouts
        self.plan = plan  # the sequences have the addresses of its block tables
        self.order = order
        self._contexts = sequences[len(sequences) - len(context) :]
        self.call = PreparedAttention(
            sequences,
            tokens,
            shape,
            partials=partials,
            layouts=1 + sum(packed),
            places=None if np.array_equal(order, np.arange(tokens)) else order,
            positions=_positions(plan.context)[order],
        )

    def go_on(self, context: Part[NDArray[np.int32]]) -> None:
        """Take the next step's context; its groups, requests and query tokens are the same."""
        self.plan = replace(self.plan, context=context)
        self._contexts[:, native.KEYS] = context.seq_lens
        self._contexts[:, native.TABLE] = _addresses(context.block_table)
        assert self.call.positions is not None
        self.call.positions[:] = _positions(context)[self.order]

    def run(
        self,
        query: Tensor,
        cache: native.Layout,
        segments: Sequence[native.Layout],
        out: Tensor,
        **of_layer: Tensor | None,
    ) -> None:
        """Attend and fuse into ``out``, for one layer.

        ``query`` and ``out`` are ``[T, Hq, D]`` in the batch's order, channels adjacent; rows
        behind the step's are left alone. ``of_layer``: slopes and sinks, see
        `PreparedAttention.run`.

        Raises:
            ValueError: other tensors, or a block id out of the cache.
        """
        tokens, heads, head_size = self.call.shape
        for name, x in (("query", query), ("out", out)):
            if len(x) < tokens or x.shape[1:] != (heads, head_size) or x.stride(2) != 1:
                raise ValueError(
                    f"{name}: expected [{tokens}, {heads}, {head_size}], channels adjacent; got "
                    f"{list(x.shape)}, strides {x.stride()}"
                )
        for name, y in of_layer.items():
            if y is None:
                continue
            if y.shape != (heads,) or y.dtype != torch.float32 or not y.is_contiguous():
                raise ValueError(
                    f"{name}: expected float32 [{heads}], adjacent; got {y.dtype} "
                    f"{list(y.shape)}, strides {y.stride()}"
                )
        self.call.layouts[:] = [cache, *segments]
        self.call.run(query, out, **of_layer)


def partial_bytes(levels: int, heads: int, head_size: int) -> int:
    """Bytes of one token's partials, float32 with LSE, in a step of so many levels."""
    return (levels + 1) * heads * (head_size + 1) * 4 if levels else 0


def sequences_of(part: Part[NDArray[np.int32]], partial: int = 0) -> NDArray[np.int64]:
    """Sequences as the kernels read them, ``[B, 8]`` (`native`), paged by layout 0.

    Args:
        part: its table has adjacent columns; the caller keeps it. partial: that they write.
    """
    table = part.block_table
    sequences = np.zeros((len(table), native.TABLE + 1), dtype=np.int64)
    sequences[:, native.FIRST] = part.query_start_loc[:-1]
    sequences[:, native.QUERIES] = np.diff(part.query_start_loc)
    sequences[:, native.KEYS] = part.seq_lens
    sequences[:, native.CAUSAL] = part.causal
    sequences[:, native.START] = 0 if part.key_starts is None else part.key_starts
    sequences[:, native.PARTIAL] = partial
    sequences[:, native.TABLE] = _addresses(table)
    return sequences


def _addresses(table: NDArray[np.int32]) -> NDArray[np.int64]:
    """Addresses of a table's rows."""
    return table.ctypes.data + np.arange(len(table)) * table.strides[0]


def _positions(context: Part[NDArray[np.int32]]) -> NDArray[np.int64]:
    """Position of each query token of the batch in its request."""
    queries = context.query_start_loc[1:] - context.query_start_loc[:-1]
    ends = context.seq_lens + (0 if context.key_starts is None else context.key_starts)
    before = (ends - queries - context.query_start_loc[:-1]).astype(np.int64)
    return np.arange(context.query_start_loc[-1]) + np.repeat(before, queries)


def _order(index: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The batch's tokens in the order of the groups, ungrouped ones last; and its inverse."""
    tokens = index.shape[1]
    if not len(index):
        return np.arange(tokens), np.arange(tokens)
    order = np.where(index[0] < 0, tokens, index[0]).argsort(kind="stable")
    places = np.empty(tokens, dtype=np.int64)
    places[order] = np.arange(tokens)
    return order, places
