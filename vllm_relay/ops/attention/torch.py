"""Both attention ops in plain torch and float32, on any device; reads lengths on the host."""

import torch
from torch import Tensor

from vllm_relay.ops.attention.providers import PagedContext

# Scores held at once: 64 MiB of float32.
_MOST_SCORES = 1 << 24


def unusable(q: Tensor, k: Tensor, v: Tensor) -> None:
    """None: takes every call."""


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.system_attention`, checked there."""
    out, lse = torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    _attend(q, k, v, scale, out, lse, causal=False)
    return out, lse


def context_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.context_attention`, checked there; one request at a time."""
    out = q.new_zeros(q.shape)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    starts: list[int] = context.query_start_loc.tolist()
    for row, length in enumerate(context.context_lens.tolist()):
        # A request's first queries see nothing if it has more queries than context.
        seeing = slice(max(starts[row], starts[row + 1] - length), starts[row + 1])
        blocks = context.block_table[row, : -(-length // k_cache.shape[1])].long()
        k, v = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        _attend(q[seeing], k, v, scale, out[seeing], lse[:, seeing], causal=True)
    return out, lse


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor, *, causal: bool
) -> None:
    """Attention of q [T, Hq, D] to k, v [S, Hkv, D], written into out and lse; S >= T if causal."""
    tokens, heads, head_size = q.shape
    keys, kv_heads, _ = k.shape
    chunk = max(1, _MOST_SCORES // (heads * max(1, keys)))
    # [Hkv, D, S] and [Hkv, S, D]
    k, v = k.permute(1, 2, 0).float(), v.transpose(0, 1).float()
    position = torch.arange(keys, device=q.device)
    for first in range(0, tokens, chunk):
        part = slice(first, min(first + chunk, tokens))
        # The query heads of one KV head are rows of one product: [Hkv, g * n, D].
        rows = q[part].transpose(0, 1).reshape(kv_heads, -1, head_size).float()
        scores = torch.bmm(rows * scale, k)
        if causal:
            last = position[keys - tokens :][part]  # the last key that each query sees
            by_query = scores.view(heads, len(last), keys)
            by_query.masked_fill_(position > last[:, None], -torch.inf)
        part_lse = torch.logsumexp(scores, -1)
        part_out = torch.bmm(scores.sub_(part_lse.unsqueeze(-1)).exp_(), v)
        out[part] = part_out.view(heads, -1, head_size).transpose(0, 1)
        lse[:, part] = part_lse.view(heads, -1)
