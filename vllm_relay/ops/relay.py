"""Relay attention as one call on dense tensors, usable without vLLM.

The interface of Hydragen (arXiv 2402.05099, section 3 and App. C): a batch of sequences, each the
concatenation of one shared piece per level and its own tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_relay.ops import checks, providers
from vllm_relay.ops.context import context_attention
from vllm_relay.ops.fusion import relay_fusion
from vllm_relay.ops.system import system_attention

_KV = "[B, L, Hkv, D]"
_SHARED = "[B_i, S_i, Hkv, D]"


def relay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_ks: Sequence[Tensor],
    shared_vs: Sequence[Tensor],
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
            B_{i+1}, and each divides B. May be empty.
        seq_lens: [B] int32, tokens of k, v in use; L where None.
        shared_seq_lens: one [B_i] int32 per level (or None for S_i).
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
    flat: Tensor, shared_k: Tensor, shared_v: Tensor, lens: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """System attention of one level: its groups are runs of adjacent rows of flat [T, Hq, D]."""
    groups = len(lens)
    width = flat.shape[0] // groups
    empty = width == 0 or shared_k.shape[1] == 0
    if (
        groups > 1
        and not empty
        and providers.choose("system", flat, shared_k[0], shared_v[0]).name == "triton"
    ):
        from vllm_relay.ops.triton.system import paged_system_attention

        # All groups in one launch: each is a sequence of one block.
        index = torch.arange(groups + 1, dtype=torch.int32, device=flat.device)
        used = torch.tensor(lens, dtype=torch.int32, device=flat.device)
        return paged_system_attention(
            flat, shared_k, shared_v, index[:groups, None], used, index * width,
            scale, width, shared_k.shape[1],
        )  # fmt: skip
    parts = [
        system_attention(
            flat[j * width : (j + 1) * width], shared_k[j, :n], shared_v[j, :n], scale=scale
        )
        for j, n in enumerate(lens)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def _levels(
    q: Tensor,
    k: Tensor,
    shared_ks: Sequence[Tensor],
    shared_vs: Sequence[Tensor],
    shared_seq_lens: Sequence[Tensor | None] | None,
) -> list[tuple[Tensor, Tensor, list[int]]]:
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
        name = f"shared_ks[{i}]"
        checks.key_value(q, shared_k, shared_v, 4, _SHARED, (name, f"shared_vs[{i}]"))
        rows, most, heads, _ = shared_k.shape
        if heads != k.shape[2]:
            raise ValueError(f"{name}: {heads} KV heads differ from k's {k.shape[2]}")
        if rows == 0 or q.shape[0] % rows or rows % coarser:
            raise ValueError(
                f"{name}: {rows} rows must divide the batch of {q.shape[0]} and be a multiple of "
                f"the coarser level's {coarser}"
            )
        coarser = rows
        used = [most] * rows
        if lens is not None:
            name = f"shared_seq_lens[{i}]"
            checks.integers(name, lens, (rows,), "[B_i]", q.device)
            used = checks.lengths(name, lens, most)
        levels.append((shared_k, shared_v, used))
    return levels
