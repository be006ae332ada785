"""Both attention ops on the C++ CPU kernels: calls of `ops.native`, made from tensors."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_relay.ops.attention.providers import PagedContext
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.prepared import AttentionShape, PreparedAttention
from vllm_relay.ops.step.native import sequences_of
from vllm_relay.plan import Part


def unusable(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take these tensors, or None."""
    if q.device.type != "cpu":
        return "needs CPU tensors"
    if k.dim() == 4 and not (native.readable(k, 1) and native.readable(v, 1)):
        return "needs KV blocks in which tokens or channels are adjacent"
    return native.unusable(q.dtype, q.shape[-1])


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.system_attention`, checked there.

    Keys and values are packed tile by tile on the way; `step` reads packed segments.
    """
    k, v = (x if native.readable(x, 0) else x.contiguous() for x in (k, v))
    sequences = np.array([[0, q.shape[0], k.shape[0], 0, 0, 0, 0, 0]])
    return attend_once(q, k.shape[1], scale, native.layout_of(k, v, paged=False), sequences)


def context_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.context_attention`, checked there; blocks are read in place."""
    table = context.block_table.to(torch.int32).contiguous()
    starts, lens = context.query_start_loc.numpy(), context.context_lens.numpy()
    part = Part(
        query_start_loc=starts,
        seq_lens=lens,
        block_table=table.numpy(),
        max_query_len=len(q),
        max_seq_len=int(lens.max(initial=0)),
        causal=True,
    )
    sequences = sequences_of(part)
    layout = native.layout_of(k_cache, v_cache, paged=True)
    return attend_once(q, k_cache.shape[2], scale, layout, sequences)


def attend_once(
    q: Tensor, kv_heads: int, scale: float, layout: native.Layout, sequences: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """One partial of every query: out ``[T, Hq, D]`` and lse ``[Hq, T]``."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    tokens, heads, head_size = q.shape
    shape = AttentionShape(
        heads=heads, kv_heads=kv_heads, head_size=head_size, dtype=q.dtype, scale=scale
    )
    out = torch.empty_like(q, device="cpu", memory_format=torch.contiguous_format)
    call = PreparedAttention(sequences, tokens, shape, lse=True)
    call.layouts[0] = layout
    call.run(q, out)
    return out, call.lse[0]
