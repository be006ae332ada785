"""Both attention ops by xformers: `memory_efficient_attention_partial`, attention with its LSE.

Supports what the documentation of xformers promises and no more.
"""

import torch
from torch import Tensor

from vllm_relay.ops.attention import providers
from vllm_relay.ops.attention.providers import PagedContext

_FMHA = "xformers.ops.fmha"
# xformers.ops.fmha.triton_splitk.FwOp, the operator that its documentation names for paged KV.
_PAGED_HEAD_SIZES = (16, 32, 64, 128, 256)
_PAGED_BLOCK = 64
_PAGED_QUERIES = 16


def unusable(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why xformers cannot take these tensors, or None. The call itself checks lengths."""
    reason = providers.not_flash(q, k, v, _PAGED_BLOCK)
    if reason is None and k.dim() == 4:
        if q.shape[-1] not in _PAGED_HEAD_SIZES:
            reason = f"needs a head size of {_PAGED_HEAD_SIZES}, not {q.shape[-1]}"
        elif any(cache.stride(0) != cache.shape[1] * cache.stride(1) for cache in (k, v)):
            reason = "needs KV blocks whose tokens follow one another in memory"
    reason = reason or providers.missing(_FMHA)
    # Also a build without the package mslk, from 0.0.35 on.
    if not reason and not hasattr(providers.module(_FMHA), "memory_efficient_attention_partial"):
        reason = "this xformers has no memory_efficient_attention_partial"
    return reason


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.system_attention`, checked there."""
    out, lse = providers.module(_FMHA).memory_efficient_attention_partial(
        *_grouped(q, k[None], v[None]), scale=scale
    )
    return out.reshape(q.shape), _flat(lse, q)


def context_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.context_attention`, checked there; reads the lengths (a sync).

    What lies in a request's last block beyond its context must be finite: xformers does not say
    that it is kept out. ValueError if requests differ in queries, have more than 16, or more
    queries than context.
    """
    fmha = providers.module(_FMHA)
    rows, columns = context.block_table.shape
    block_size = k_cache.shape[1]
    lens: list[int] = context.context_lens.tolist()
    if q.shape[0] != rows * context.max_query_len or context.max_query_len > _PAGED_QUERIES:
        raise ValueError(
            f"context provider 'xformers': needs as many queries in every row, {_PAGED_QUERIES} at "
            "most"
        )
    if min(lens) < context.max_query_len:
        raise ValueError("context provider 'xformers': a row has more queries than context")
    # Columns beyond a context may hold anything; make them valid.
    used = torch.arange(columns, device=q.device) * block_size < context.context_lens[:, None]
    bias = fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[context.max_query_len] * rows,
        kv_seqlen=lens,
        block_tables=torch.where(used, context.block_table, 0).int(),
        page_size=block_size,
        device=q.device,
    )
    # [num_blocks, block_size, Hkv, D] -> [1, num_blocks * block_size, Hkv, D], a view.
    flat = [cache.view(1, -1, *cache.shape[2:]) for cache in (k_cache, v_cache)]
    out, lse = fmha.memory_efficient_attention_partial(
        *_grouped(q, *flat), attn_bias=bias, scale=scale, op=fmha.triton_splitk.FwOp
    )
    return out.reshape(q.shape), _flat(lse, q)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, Hq, D] and two [1, S, Hkv, D] as xformers writes GQA: [1, T or S, Hkv, g, D]."""
    kv_heads = k.shape[2]
    rows = q.unflatten(1, (kv_heads, -1))[None]
    return rows, *(x.unsqueeze(3).expand(-1, -1, -1, rows.shape[3], -1) for x in (k, v))


def _flat(lse: Tensor, q: Tensor) -> Tensor:
    """[1, Hkv, g, T] to [Hq, T] float32; some operators pad T."""
    tokens, heads, _ = q.shape
    if lse.shape[0] != 1 or lse.dim() != 4 or lse.shape[-1] < tokens:
        raise ValueError(f"xformers returned an LSE of shape {tuple(lse.shape)}")
    return lse[0, :, :, :tokens].reshape(heads, tokens).float()
