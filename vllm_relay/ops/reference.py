"""The oracle: relay attention in plain torch and float64, on any device, slow and obviously right.

Shares no code with the ops. `dtype` sets the precision of all arithmetic and of the results.
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
    window: int | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Dense attention with its log-sum-exp.

    Args:
        q: [T, Hq, D].
        k, v: [S, Hkv, D]; Hkv divides Hq.
        scale: multiplies the scores; D ** -0.5 where None.
        causal: query i of T sees keys 0 .. S - T + i (aligned to the end); else it sees all.
        window: query i does not see keys before S - T + i - window; None: no limit.
        softcap: scores become softcap * tanh(score / softcap); 0: they do not.
        slopes: [Hq], ALiBi's: slope * (key - (S - T + i)) is added to the scores.
        sinks: [Hq], logits of one more key whose value is 0.

    Returns:
        out [T, Hq, D] and lse [Hq, T] (natural logarithm), both in `dtype`. A query that sees no
        key has out 0 and lse -inf.
    """
    tokens, heads, head_size = q.shape
    keys, kv_heads, _ = k.shape
    q, k, v = (x.to(dtype) for x in (q, k, v))
    # Query head h reads KV head h // g.
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    scores = torch.einsum("thgd,shd->hgts", grouped, k)
    scores *= head_size**-0.5 if scale is None else scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    key = torch.arange(keys, device=q.device)
    last = torch.arange(tokens, device=q.device)[:, None] + keys - tokens
    if slopes is not None:
        slopes = slopes.to(dtype).view(kv_heads, -1, 1, 1)
        scores = scores + slopes * (key - last)
    if causal:
        scores = scores.masked_fill(key > last, -torch.inf)
    if window is not None:
        scores = scores.masked_fill(key < last - window, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype).view(kv_heads, -1, 1))
    weights = torch.exp(scores - lse[..., None])
    weights = weights.masked_fill(torch.isneginf(lse)[..., None], 0)
    out = torch.einsum("hgts,shd->thgd", weights, v)
    return out.reshape(tokens, heads, v.shape[-1]), lse.reshape(heads, tokens)


def context_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    scale: float | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Paged attention; arguments as `vllm_relay.ops.context_attention` and `attention_lse`.

    A token of q that no request has gets out 0 and lse -inf.
    """
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
    starts = query_start_loc.tolist()
    for row, length in enumerate(context_lens.tolist()):
        part = slice(starts[row], starts[row + 1])
        blocks = block_table[row, : -(-length // k_cache.shape[1])].long()
        k, v = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[part], lse[:, part] = attention_lse(
            q[part],
            k,
            v,
            scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            dtype=dtype,
        )
    return out, lse


def relay_fusion(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """out = sum_i out_i * exp(lse_i - logsumexp_i lse_i) per token and head; [T, H, D].

    A partial whose lse is -inf or +inf contributes nothing, whatever its out holds.
    """
    tokens, heads, _ = outs[0].shape
    fused = torch.zeros(outs[0].shape, dtype=dtype, device=outs[0].device)
    for t in range(tokens):
        for h in range(heads):
            live = [i for i, lse in enumerate(lses) if not torch.isinf(lse[h, t])]
            if not live:
                continue
            weights = torch.softmax(torch.stack([lses[i][h, t].to(dtype) for i in live]), 0)
            for weight, i in zip(weights, live, strict=True):
                fused[t, h] += weight * outs[i][t, h].to(dtype)
    return fused
