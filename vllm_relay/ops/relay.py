"""Relay attention as one call on dense tensors, usable without vLLM.

The interface of Hydragen (arXiv 2402.05099, section 3 and App. C): a batch of sequences, each the
concatenation of one shared piece per level and its own tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_relay.ops import checks
from vllm_relay.ops.attention import context_attention, providers, system_attention
from vllm_relay.ops.attention.providers import PagedContext
from vllm_relay.ops.fusion import relay_fusion

_KV = "[B, L, Hkv, D]"
_SHARED = "[B_i, S_i, Hkv, D]"
_EXACT = "[S_j, Hkv, D]"

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
    checks.key_value(q, k, v, 4, _KV)
    batch, queries, q_heads, head_size = q.shape
    if k.shape[0] != batch:
        raise ValueError(f"k: batch of {k.shape[0]} differs from q's {batch}")
    scale = checks.scale_or_default(scale, head_size)
    own = k.shape[1]
    if seq_lens is None:
        seq_lens = torch.full((batch,), own, dtype=torch.int32, device=q.device)
    checks.integers("seq_lens", seq_lens, (batch,), "[B]", q.device)
    checks.lengths("seq_lens", seq_lens, own)
    levels = _levels(q, k, shared_ks, shared_vs, shared_seq_lens)

    flat = q.reshape(batch * queries, q_heads, head_size)
    outs, lses = [], []
    for shared_k, shared_v, lens in levels:
        out, lse = _attend_level(flat, shared_k, shared_v, lens, scale)
        outs.append(out)
        lses.append(lse)
    if own:
        # Each row's own tokens are a cache of one block per row.
        rows = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        out, lse = context_attention(
            flat, k, v, rows[:batch, None], seq_lens, rows * queries, scale=scale
        )
        outs.append(out)
        lses.append(lse)
    if not outs:
        return q.new_zeros(q.shape)
    return relay_fusion(outs, lses).view(q.shape)


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
        system_attention(
            flat[j * width : (j + 1) * width], shared_k[j][:n], shared_v[j][:n], scale=scale
        )
        for j, n in enumerate(lens)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def _levels(
    q: Tensor,
    k: Tensor,
    shared_ks: Sequence[Pieces],
    shared_vs: Sequence[Pieces],
    shared_seq_lens: Sequence[Tensor | None] | None,
) -> list[tuple[Pieces, Pieces, list[int]]]:
    """The checked levels as (k, v, tokens in use per row)."""
    if len(shared_vs) != len(shared_ks):
        raise ValueError(f"shared_vs: {len(shared_vs)} levels, but shared_ks has {len(shared_ks)}")
    all_lens = [None] * len(shared_ks) if shared_seq_lens is None else shared_seq_lens
    if len(all_lens) != len(shared_ks):
        raise ValueError(
            f"shared_seq_lens: {len(all_lens)} levels, but shared_ks has {len(shared_ks)}"
        )
    levels = []
    coarser = 1
    for i, (shared_k, shared_v, lens) in enumerate(
        zip(shared_ks, shared_vs, all_lens, strict=True)
    ):
        used = _sizes(q, k.shape[2], i, shared_k, shared_v)
        rows = len(used)
        if rows == 0 or q.shape[0] % rows or rows % coarser:
            raise ValueError(
                f"shared_ks[{i}]: {rows} rows must divide the batch of {q.shape[0]} and be a "
                f"multiple of the coarser level's {coarser}"
            )
        coarser = rows
        if lens is not None:
            name = f"shared_seq_lens[{i}]"
            if not isinstance(shared_k, Tensor):
                raise ValueError(f"{name}: expected None, the pieces of a list are used whole")
            checks.integers(name, lens, (rows,), "[B_i]", q.device)
            used = checks.lengths(name, lens, shared_k.shape[1])
        levels.append((shared_k, shared_v, used))
    return levels


def _sizes(q: Tensor, kv_heads: int, i: int, shared_k: Any, shared_v: Any) -> list[int]:
    """Tokens of each piece of level i, once the level is known to fit."""
    if not isinstance(shared_k, list | tuple):
        _key_value(q, kv_heads, shared_k, shared_v, 4, _SHARED, f"[{i}]")
        rows, most = shared_k.shape[:2]
        return [most] * rows
    if not isinstance(shared_v, list | tuple) or len(shared_v) != len(shared_k):
        raise ValueError(f"shared_vs[{i}]: expected {len(shared_k)} tensors {_EXACT}")
    for j, (piece_k, piece_v) in enumerate(zip(shared_k, shared_v, strict=True)):
        _key_value(q, kv_heads, piece_k, piece_v, 3, _EXACT, f"[{i}][{j}]")
    return [piece.shape[0] for piece in shared_k]


def _key_value(
    q: Tensor, kv_heads: int, k: Tensor, v: Tensor, dims: int, layout: str, index: str
) -> None:
    name = f"shared_ks{index}"
    checks.key_value(q, k, v, dims, layout, (name, f"shared_vs{index}"))
    if k.shape[-2] != kv_heads:
        raise ValueError(f"{name}: {k.shape[-2]} KV heads differ from k's {kv_heads}")
