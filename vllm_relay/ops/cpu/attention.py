"""The ops on our own CPU kernels: calls of `native`, made from tensors."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_relay.ops.native import library as native


def usable(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take a call of an op, or None (`providers.Usable`)."""
    if q.device.type != "cpu":
        return "needs CPU tensors"
    if k.dim() == 4 and not (native.readable(k, 1) and native.readable(v, 1)):
        return "needs KV blocks in which tokens or channels are adjacent"
    return native.unusable(q.dtype, q.shape[-1])


def call_for(
    q: Tensor, kv_heads: int, scale: float, layouts: Any, sequences: NDArray[np.int64]
) -> native.Call:
    """A call whose results are still to be given places; the caller keeps the arrays alive.

    Args:
        q: ``[T, Hq, D]``, channels adjacent. layouts: an array of `native.Layout`. sequences:
            ``[n, 7]``, see `native`.
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


def attend_once(
    q: Tensor, kv_heads: int, scale: float, layout: native.Layout, sequences: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """One partial of every query; arguments as `call_for`, out and lse as the ops return them."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    call = call_for(q, kv_heads, scale, (native.Layout * 1)(layout), sequences)
    out, lse = make_results(call, q)
    native.loaded().attend(call)
    return out, lse


def make_results(call: native.Call, q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the one partial of a call, as the ops return it."""
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[1], q.shape[0])
    call.out, call.out_token, call.out_head = out.data_ptr(), out.stride(0), out.stride(1)
    call.lse, call.lse_head, call.lse_token = lse.data_ptr(), lse.stride(0), lse.stride(1)
    return out, lse


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.system_attention`, checked there; T and S are at least 1.

    Keys and values are packed tile by tile on the way; `step` reads those that are packed for good.
    """
    k, v = (x if native.readable(x, 0) else x.contiguous() for x in (k, v))
    sequences = np.array([[0, q.shape[0], k.shape[0], 0, 0, 0, 0]])
    return attend_once(q, k.shape[1], scale, native.layout_of(k, v, paged=False), sequences)


def context_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    max_query_len: int,
    max_context_len: int,
) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.context_attention`, checked there: blocks are read in place."""
    table = block_table.to(torch.int32).contiguous()
    sequences = context_sequences(table.numpy(), context_lens.numpy(), query_start_loc.numpy())
    layout = native.layout_of(k_cache, v_cache, paged=True)
    return attend_once(q, k_cache.shape[2], scale, layout, sequences)


def context_sequences(
    table: NDArray[np.int32], context_lens: NDArray[Any], query_start_loc: NDArray[Any]
) -> NDArray[np.int64]:
    """Rows of contexts, paged by layout 0; table ``[R, M]``, dense, is kept alive by the caller."""
    sequences = np.zeros((len(table), native.TABLE + 1), dtype=np.int64)
    sequences[:, native.FIRST] = query_start_loc[:-1]
    sequences[:, native.QUERIES] = np.diff(query_start_loc)
    sequences[:, native.KEYS] = context_lens
    sequences[:, native.CAUSAL] = 1
    sequences[:, native.TABLE] = table.ctypes.data + np.arange(len(table)) * table.strides[0]
    return sequences


def fuse(
    outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, places: Tensor | None = None
) -> None:
    """Relay fusion of partials ``[N, H, D]``, ``[H, N]`` into the places of out, or the first N.

    Args:
        outs: of out's dtype or all float32; channels adjacent, as in out. places: int64 ``[N]``.
    """
    library = native.loaded()
    tokens, heads, head_size = outs[0].shape
    count = len(outs)
    call = native.FuseCall(
        dtype=native.DTYPES[outs[0].dtype],
        fused_dtype=native.DTYPES[out.dtype],
        tokens=tokens,
        heads=heads,
        head_size=head_size,
        partials=count,
        threads=torch.get_num_threads(),
        outs=(ctypes.c_void_p * count)(*(x.data_ptr() for x in outs)),
        lses=(ctypes.c_void_p * count)(*(x.data_ptr() for x in lses)),
        out_token=(ctypes.c_int64 * count)(*(x.stride(0) for x in outs)),
        out_head=(ctypes.c_int64 * count)(*(x.stride(1) for x in outs)),
        lse_token=(ctypes.c_int64 * count)(*(x.stride(1) for x in lses)),
        lse_head=(ctypes.c_int64 * count)(*(x.stride(0) for x in lses)),
        places=None if places is None else places.data_ptr(),
        fused=out.data_ptr(),
        fused_token=out.stride(0),
        fused_head=out.stride(1),
        parallel=library.parallel,
    )
    library.fuse(call)
