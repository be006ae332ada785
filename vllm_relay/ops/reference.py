"""The oracle: relay attention in plain torch and float64, slow and obviously right.

Every function follows the definition, one row at a time, and shares no code with the ops. `dtype`
sets the precision of all arithmetic and of the results.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Dense attention with its log-sum-exp.

    Args:
        q: [T, Hq, D].
        k, v: [S, Hkv, D]; Hkv divides Hq.
        scale: multiplies the scores; D ** -0.5 where None.
        causal: query i of T sees keys 0 .. S - T + i (aligned to the end); else it sees all.

    Returns:
        out [T, Hq, D] and lse [Hq, T] (natural logarithm), both in `dtype`. A query that sees no
        key has out 0 and lse -inf.
    """
    tokens, q_heads, head_size = q.shape
    keys, kv_heads, _ = k.shape
    scale = head_size**-0.5 if scale is None else scale
    out = torch.zeros(tokens, q_heads, head_size, dtype=dtype)
    lse = torch.full((q_heads, tokens), -torch.inf, dtype=dtype)
    for t in range(tokens):
        seen = max(0, keys - tokens + t + 1) if causal else keys
        if seen == 0:
            continue
        for h in range(q_heads):
            kv = h // (q_heads // kv_heads)
            scores = k[:seen, kv].to(dtype) @ q[t, h].to(dtype) * scale
            lse[h, t] = torch.logsumexp(scores, 0)
            out[t, h] = torch.exp(scores - lse[h, t]) @ v[:seen, kv].to(dtype)
    return out, lse


def context_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    scale: float | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Paged causal attention; arguments as `vllm_relay.ops.context_attention`."""
    outs, lses = [], []
    block_size = k_cache.shape[1]
    for row, length in enumerate(context_lens.tolist()):
        start, end = query_start_loc[row : row + 2].tolist()
        slots = [(int(block_table[row, i // block_size]), i % block_size) for i in range(length)]
        k = torch.stack([k_cache[slot] for slot in slots]) if slots else k_cache[0, :0]
        v = torch.stack([v_cache[slot] for slot in slots]) if slots else v_cache[0, :0]
        out, lse = attention_lse(q[start:end], k, v, scale, causal=True, dtype=dtype)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)


def relay_fusion(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """out = sum_i out_i * exp(lse_i - logsumexp_i lse_i) per token and head; [T, H, D].

    A partial whose lse is -inf or +inf contributes nothing, whatever its out holds.
    """
    tokens, heads, head_size = outs[0].shape
    fused = torch.zeros(tokens, heads, head_size, dtype=dtype)
    for t in range(tokens):
        for h in range(heads):
            live = [i for i, lse in enumerate(lses) if not torch.isinf(lse[h, t])]
            if not live:
                continue
            weights = torch.softmax(torch.stack([lses[i][h, t].to(dtype) for i in live]), 0)
            for weight, i in zip(weights, live, strict=True):
                fused[t, h] += weight * outs[i][t, h].to(dtype)
    return fused
