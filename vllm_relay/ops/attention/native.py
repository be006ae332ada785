"""Both attention ops on the C++ CPU kernels: calls of `ops.native`, made from tensors."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_relay.ops.attention.providers import PagedContext
from vllm_relay.ops.native import library as native


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
    sequences = np.array([[0, q.shape[0], k.shape[0], 0, 0, 0, 0]])
    return attend_once(q, k.shape[1], scale, native.layout_of(k, v, paged=False), sequences)


def context_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.context_attention`, checked there; blocks are read in place."""
    table = context.block_table.to(torch.int32).contiguous()
    sequences = context_sequences(
        table.numpy(), context.context_lens.numpy(), context.query_start_loc.numpy()
    )
    layout = native.layout_of(k_cache, v_cache, paged=True)
    return attend_once(q, k_cache.shape[2], scale, layout, sequences)


def context_sequences(
    table: NDArray[np.int32], context_lens: NDArray[Any], query_start_loc: NDArray[Any]
) -> NDArray[np.int64]:
    """Contexts as sequences `[R, 7]` of the kernels, paged by layout 0.

    The sequences hold addresses of the table ``[R, M]``: it is dense, and the caller keeps it.
    """
    sequences = np.zeros((len(table), native.TABLE + 1), dtype=np.int64)
    sequences[:, native.FIRST] = query_start_loc[:-1]
    sequences[:, native.QUERIES] = np.diff(query_start_loc)
    sequences[:, native.KEYS] = context_lens
    sequences[:, native.CAUSAL] = 1
    sequences[:, native.TABLE] = table.ctypes.data + np.arange(len(table)) * table.strides[0]
    return sequences


def attend_once(
    q: Tensor, kv_heads: int, scale: float, layout: native.Layout, sequences: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """One partial of every query: out ``[T, Hq, D]`` and lse ``[Hq, T]``; see `call_for`."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    call = call_for(q, kv_heads, scale, (native.Layout * 1)(layout), sequences)
    out, lse = make_results(call, q)
    native.loaded().attend(call)
    return out, lse


def call_for(
    q: Tensor, kv_heads: int, scale: float, layouts: Any, sequences: NDArray[np.int64]
) -> native.Call:
    """A call without places for its results; the caller keeps all arrays alive.

    Args:
        q: ``[T, Hq, D]``, channels adjacent.
        layouts: an array of `native.Layout`.
        sequences: int64 ``[n, 7]``, see `native`.
    """
    dtype = native.DTYPES[q.dtype]
    return native.Call(
        dtype=dtype,
        out_dtype=dtype,
        heads=q.shape[1],
        kv_heads=kv_heads,
        head_size=q.shape[2],
        tokens=q.shape[0],
        partials=1,
        threads=torch.get_num_threads(),
        scale=scale,
        q=q.data_ptr(),
        q_token=q.stride(0),
        q_head=q.stride(1),
        layouts=layouts,
        sequences=sequences.ctypes.data,
        num_layouts=len(layouts),
        num_sequences=len(sequences),
        parallel=native.loaded().parallel,
    )


def make_results(call: native.Call, q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the one partial of a call: out ``[T, Hq, D]``, lse ``[Hq, T]`` float32."""
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[1], q.shape[0])
    call.out, call.out_token, call.out_head = out.data_ptr(), out.stride(0), out.stride(1)
    call.lse, call.lse_head, call.lse_token = lse.data_ptr(), lse.stride(0), lse.stride(1)
    return out, lse
