"""One step's relay attention on the CPU kernels: laid out once, run by every layer.

All levels and contexts are one call: its work is divided among the threads as a whole, and the
partials are fused where they belong. No tensor is gathered or allocated per layer.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_relay.ops.native import library as native
from vllm_relay.plan import Part, Plan

HostPart = Part[NDArray[np.int32]]


class NativeStep:
    """The layout of one step for the kernels.

    Args:
        plan: levels and context. packed: per group, level by level, whether it is read from a
            packed segment; else from the KV cache.
        heads, kv_heads, head_size, dtype, scale: of the layers.
    """

    def __init__(
        self,
        plan: Plan[NDArray[np.int32]],
        packed: Sequence[bool] = (),
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        self._library = native.loaded()
        order, places = _order(plan.index)
        tokens, partials = len(order), len(plan.levels) + 1
        levels = [sequences_of(part, level) for level, part in enumerate(plan.levels)]
        context = sequences_of(plan.context, partials - 1)
        # The context's tokens are in the order of the batch, the step's in that of the groups.
        context[:, native.FIRST] = np.append(places, tokens)[context[:, native.FIRST]]
        sequences = np.concatenate([*levels, context])
        sequences = sequences[(sequences[:, native.KEYS] > 0) | (sequences[:, native.CAUSAL] > 0)]
        # Layout 0 is the KV cache, the others are packed segments.
        layouts = np.cumsum(packed) * np.array(packed, dtype=np.int64)
        sequences[: len(layouts), native.LAYOUT] = layouts
        same = np.array_equal(order, np.arange(tokens))
        self._layouts = (native.Layout * (1 + sum(packed)))()
        self._out = torch.empty(partials, tokens, heads, head_size)
        self._lse = torch.empty(partials, heads, tokens)
        # The arrays whose addresses the call holds.
        self._kept = (sequences, plan, order)
        self._call = native.Call(
            dtype=native.DTYPES[dtype],
            out_dtype=native.DTYPES[torch.float32],
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            tokens=tokens,
            partials=partials,
            threads=torch.get_num_threads(),
            scale=scale,
            places=None if same else order.ctypes.data,
            out=self._out.data_ptr(),
            out_partial=self._out.stride(0),
            out_token=self._out.stride(1),
            out_head=self._out.stride(2),
            lse=self._lse.data_ptr(),
            lse_partial=self._lse.stride(0),
            lse_head=self._lse.stride(1),
            lse_token=self._lse.stride(2),
            layouts=self._layouts,
            sequences=sequences.ctypes.data,
            num_layouts=len(self._layouts),
            num_sequences=len(sequences),
            parallel=self._library.parallel,
        )

    def run(
        self, query: Tensor, cache: native.Layout, segments: Sequence[native.Layout], out: Tensor
    ) -> None:
        """Attend and fuse, for one layer.

        Args:
            query, out: ``[T, Hq, D]`` of the batch, channels adjacent; out is written.
            cache, segments: this layer's KV cache and packed segments.

        Raises:
            ValueError: a block id lies outside the cache.
        """
        call = self._call
        self._layouts[0] = cache
        for index, segment in enumerate(segments):
            self._layouts[1 + index] = segment
        call.q, call.q_token, call.q_head = query.data_ptr(), query.stride(0), query.stride(1)
        call.fused, call.fused_token, call.fused_head = out.data_ptr(), out.stride(0), out.stride(1)
        self._library.attend(call)


def sequences_of(part: HostPart, partial: int = 0) -> NDArray[np.int64]:
    """A part's sequences as the kernels read them, ``[B, 7]`` (`native`); the caller keeps the
    part.

    Args:
        part: its block table has adjacent columns. partial: the partial that they write.
    """
    table = part.block_table
    sequences = np.zeros((len(table), native.TABLE + 1), dtype=np.int64)
    sequences[:, native.FIRST] = part.query_start_loc[:-1]
    sequences[:, native.QUERIES] = np.diff(part.query_start_loc)
    sequences[:, native.KEYS] = part.seq_lens
    sequences[:, native.CAUSAL] = part.causal
    sequences[:, native.PARTIAL] = partial
    sequences[:, native.TABLE] = table.ctypes.data + np.arange(len(table)) * table.strides[0]
    return sequences


def _order(index: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The batch's tokens in the order of the groups, ungrouped ones last; and its inverse."""
    tokens = index.shape[1]
    if not len(index):
        return np.arange(tokens), np.arange(tokens)
    order = np.where(index[0] < 0, tokens, index[0]).argsort(kind="stable")
    places = np.empty(tokens, dtype=np.int64)
    places[order] = np.arange(tokens)
    return order, places
