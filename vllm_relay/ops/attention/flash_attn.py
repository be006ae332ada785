"""Both attention ops by FlashAttention, from the package flash-attn (2.7 or later)."""

import torch
from torch import Tensor

from vllm_relay.ops.attention import providers
from vllm_relay.ops.attention import torch as plain
from vllm_relay.ops.attention.providers import PagedContext

_PACKAGE = "flash_attn"


def unusable(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the package cannot take these tensors, or None; its KV blocks are multiples of 256."""
    return providers.not_flash(q, k, v, 256) or providers.missing(_PACKAGE)


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """System attention by `flash_attn_with_kvcache`, which splits keys over idle processors."""
    out, lse = providers.module(_PACKAGE).flash_attn_with_kvcache(
        q[None], k[None], v[None], softmax_scale=scale, causal=False, return_softmax_lse=True
    )
    return out[0], _checked(lse[0], q)


def context_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
) -> tuple[Tensor, Tensor]:
    """Context attention by `flash_attn_with_kvcache` if all requests have as many queries.

    Else by `flash_attn_varlen_func`, which does not split keys, or by plain torch if some queries
    see nothing: their LSE would be written over that of others (Dao-AILab/flash-attention#2842).
    """
    package = providers.module(_PACKAGE)
    rows, most = context.context_lens.shape[0], context.max_query_len
    lens, table = (x.int().contiguous() for x in (context.context_lens, context.block_table))
    if q.shape[0] == rows * most:
        out, lse = package.flash_attn_with_kvcache(
            q.view(rows, most, *q.shape[1:]),
            k_cache,
            v_cache,
            cache_seqlens=lens,
            block_table=table,
            softmax_scale=scale,
            causal=True,
            return_softmax_lse=True,
        )
        out = out.reshape(q.shape)
        # [R, Hq, n] -> [Hq, T]
        lse = lse.transpose(0, 1).reshape(q.shape[1], -1)
    elif bool((lens < context.query_start_loc.diff()).any()):
        return plain.context_attention(q, k_cache, v_cache, context, scale)
    else:
        sums = torch.cumsum(lens, 0, dtype=torch.int32)
        out, lse, _ = package.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=context.query_start_loc.int().contiguous(),
            cu_seqlens_k=torch.nn.functional.pad(sums, (1, 0)),
            # A maximum of 1 means one query in every row.
            max_seqlen_q=max(most, 2),
            max_seqlen_k=context.max_context_len,
            softmax_scale=scale,
            causal=True,
            block_table=table,
            return_attn_probs=True,
        )
    # +inf stands for a query that sees nothing.
    return out, _checked(lse, q).masked_fill_(lse == torch.inf, -torch.inf)


def _checked(lse: Tensor, q: Tensor) -> Tensor:
    """`lse` if it is [Hq, T]: releases of flash_attn before 2.7 returned another layout."""
    if lse.shape != (q.shape[1], q.shape[0]):
        raise ValueError(
            f"FlashAttention returned an LSE of shape {tuple(lse.shape)}, not [Hq, T] = "
            f"{(q.shape[1], q.shape[0])}; flash-attn 2.7 or later is needed"
        )
    return lse
