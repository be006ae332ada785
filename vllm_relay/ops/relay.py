"""Relay attention as one call on dense tensors, usable without vLLM.

The interface of Hydragen (arXiv 2402.05099, section 3 and App. C): a batch of sequences, each the
concatenation of one shared piece per level and its own tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_relay.ops import checks
from vllm_relay.ops.attention import providers
from vllm_relay.ops.attention.op import context_attention, system_attention
from vllm_relay.ops.attention.providers import PagedContext
from vllm_relay.ops.fusion.op import relay_fusion

# One padded tensor, or one tensor per row.
Pieces = Tensor | Sequence[Tensor]


def relay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_ks: Sequence[Pieces],
    shared_vs: Sequence[Pieces],
    seq_lens: Tensor | None = None,
    shared_seq_lens: Sequence[Tensor | None] | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention over shared pieces, each read once per group, and each row's own tokens.

    Row b of the batch attends to: row `b // (B / B_i)` of every level i, then its own k, v. All
    Nq queries of a row see all shared tokens. Its own tokens are causal, aligned to the end: query
    i of Nq sees the first `seq_len - Nq + 1 + i` of them (with Nq = 1, all).

    Args:
        q: [B, Nq, Hq, D], bf16, fp16 or fp32.
        k, v: [B, L, Hkv, D]; Hkv divides Hq; L may be 0.
        shared_ks, shared_vs: one [B_i, S_i, Hkv, D] per level, coarsest first: B_i divides
            B_{i+1}, and each divides B. May be empty. A level may also be a list or tuple of B_i
            tensors [S_j, Hkv, D] without padding, as `packed.split(lens)` gives; on CUDA it costs
            one launch per piece.
        seq_lens: [B] int32, tokens of k, v in use; L where None.
        shared_seq_lens: one [B_i] int32 per level (or None for S_i, and where it is a list).
        scale: multiplies the scores; D ** -0.5 where None.

    Returns:
        [B, Nq, Hq, D] in q's dtype; 0 for a query that sees nothing.

    Raises:
        ValueError: a shape, dtype, device or length does not fit; the message names the argument.
    """
    checks.query(q, 4, "[B, Nq, Hq, D]")
    checks.key_value(q, k, v, 4, "[B, L, Hkv, D]")
    batch, queries, q_heads, head_size = q.shape
    if k.shape[0] != batch:
        raise ValueError(f"k: batch of {k.shape[0]} differs from q's {batch}")
    scale = checks.scale_or_default(scale, head_size)
    own = k.shape[1]
    if seq_lens is None:
        seq_lens = torch.full((batch,), own, dtype=torch.int32, device=q.device)
    checks.lengths("seq_lens", seq_lens, batch, "[B]", q.device, own)
    all_lens = [None] * len(shared_ks) if shared_seq_lens is None else shared_seq_lens
    for name, given in (("shared_vs", shared_vs), ("shared_seq_lens", all_lens)):
        if len(given) != len(shared_ks):
            raise ValueError(f"{name}: {len(given)} levels, but shared_ks has {len(shared_ks)}")
    levels: list[tuple[Pieces, Pieces, list[int]]] = []
    for i, (shared_k, shared_v, lens) in enumerate(
        zip(shared_ks, shared_vs, all_lens, strict=True)
    ):
        coarser = len(levels[-1][2]) if levels else 1
        used = _tokens(q, k.shape[2], i, coarser, shared_k, shared_v, lens)
        levels.append((shared_k, shared_v, used))

    flat = q.reshape(batch * queries, q_heads, head_size)
    partials = [_attend_level(flat, *level, scale) for level in levels]
    if own:
        # Each row's own tokens are a cache of one block per row.
        rows = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        partials.append(
            context_attention(flat, k, v, rows[:batch, None], seq_lens, rows * queries, scale=scale)
        )
    if not partials:
        return q.new_zeros(q.shape)
    outs, lses = zip(*partials, strict=True)
    return relay_fusion(outs, lses).view(q.shape)


def _tokens(
    q: Tensor, kv_heads: int, i: int, coarser: int, k: Any, v: Any, lens: Tensor | None
) -> list[int]:
    """Tokens in use of each piece of level i, once it fits below a level of `coarser` pieces."""
    k_name, v_name, name = f"shared_ks[{i}]", f"shared_vs[{i}]", f"shared_seq_lens[{i}]"
    exact = isinstance(k, list | tuple)
    layout = "[S_j, Hkv, D]" if exact else "[B_i, S_i, Hkv, D]"
    pieces = [("", k, v)]
    if exact:
        if not isinstance(v, list | tuple) or len(v) != len(k):
            raise ValueError(f"{v_name}: expected {len(k)} tensors {layout}")
        pieces = [(f"[{j}]", *pair) for j, pair in enumerate(zip(k, v, strict=True))]
    for j, piece_k, piece_v in pieces:
        names = k_name + j, v_name + j
        checks.key_value(q, piece_k, piece_v, 3 if exact else 4, layout, names)
        if piece_k.shape[-2] != kv_heads:
            raise ValueError(f"{names[0]}: {piece_k.shape[-2]} KV heads differ from k's {kv_heads}")
    checks.level_rows(k_name, len(k), len(q), coarser)
    if lens is None:
        return [len(piece) for piece in k] if exact else [k.shape[1]] * len(k)
    if exact:
        raise ValueError(f"{name}: expected None, the pieces of a list are used whole")
    return checks.lengths(name, lens, len(k), "[B_i]", q.device, k.shape[1])


def _attend_level(
    flat: Tensor, shared_k: Pieces, shared_v: Pieces, lens: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """System attention of one level: its groups are runs of adjacent rows of flat [T, Hq, D]."""
    groups = len(lens)
    width = flat.shape[0] // groups
    if isinstance(shared_k, Tensor) and groups > 1 and width > 0 and shared_k.shape[1] > 0:
        provider = providers.choose("system", flat, shared_k[0], shared_v[0]).implementation
        attend = getattr(provider, "paged_system_attention", None)
        if attend is not None:
            # All groups in one launch: each has a cache of one block.
            index = torch.arange(groups + 1, dtype=torch.int32, device=flat.device)
            context = PagedContext(
                block_table=index[:groups, None],
                context_lens=torch.tensor(lens, dtype=torch.int32, device=flat.device),
                query_start_loc=index * width,
                max_query_len=width,
                max_context_len=shared_k.shape[1],
            )
            out, lse = attend(flat, shared_k, shared_v, context, scale)
            return out, lse
    parts = [
        system_attention(q, k[:n], v[:n], scale=scale)
        for q, k, v, n in zip(flat.tensor_split(groups), shared_k, shared_v, lens, strict=True)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)
