"""System and context attention: arguments are checked, then a provider computes."""

from itertools import pairwise

import torch
from torch import Tensor

from vllm_relay.ops import checks
from vllm_relay.ops.attention import providers
from vllm_relay.ops.attention.providers import PagedContext


def system_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Unmasked attention of every query of a group to every key of the segment it shares.

    The queries are the rows of one sequence, so K and V are read once for the whole group
    (RelayAttention, arXiv 2402.14808, Alg. 1; Hydragen, arXiv 2402.05099, section 3).

    Args:
        q: [T, Hq, D], bf16, fp16 or fp32.
        k, v: [S, Hkv, D], q's dtype, any strides; Hkv divides Hq (MHA, GQA, MQA). A last dim
            that is not dense costs a copy.
        scale: multiplies the scores; D ** -0.5 where None.

    Returns:
        out [T, Hq, D] in q's dtype and lse [Hq, T] float32, natural logarithm. Either may be a
        strided view. With S = 0, out is 0 and lse is -inf.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument. Or the
            provider that was forced (`vllm_relay.ops.providers`) cannot take these tensors.
    """
    checks.query(q, 3, "[T, Hq, D]")
    checks.key_value(q, k, v, 3, "[S, Hkv, D]")
    scale = checks.scale_or_default(scale, q.shape[-1])
    if q.shape[0] == 0 or k.shape[0] == 0:
        return _nothing(q)
    return providers.choose("system", q, k, v).implementation.system_attention(q, k, v, scale)


def context_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of each request's queries to its own blocks, aligned to the end.

    Query i of the n of a request sees the first `context_len - n + 1 + i` tokens of its context,
    so the last query sees all of it. Reads the lengths and checks the block ids on the host (a
    sync on CUDA).

    Args:
        q: [T, Hq, D], bf16, fp16 or fp32; requests one after another.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], q's dtype, any strides. What lies
            beyond a request's context may be anything, NaN included.
        block_table: [R, M] int32; only the first ceil(context_len / block_size) are read.
        context_lens: [R] int32, 0 .. M * block_size.
        query_start_loc: [R + 1] int32: request r has the queries q[loc[r] : loc[r + 1]].
        scale: multiplies the scores; D ** -0.5 where None.

    Returns:
        out [T, Hq, D] in q's dtype and lse [Hq, T] float32, natural logarithm. A query that sees
        nothing has out 0 and lse -inf.

    Raises:
        ValueError: a shape, dtype, device, length or block id does not fit; names the argument. Or
            the provider that was forced (`vllm_relay.ops.providers`) cannot take the call.
    """
    checks.query(q, 3, "[T, Hq, D]")
    checks.key_value(
        q, k_cache, v_cache, 4, "[num_blocks, block_size, Hkv, D]", ("k_cache", "v_cache")
    )
    checks.rank("block_table", block_table, 2, "[R, M]")
    scale = checks.scale_or_default(scale, q.shape[-1])
    num_blocks, block_size = k_cache.shape[:2]
    rows, columns = block_table.shape
    checks.integers("block_table", block_table, (rows, columns), "[R, M]", q.device)
    checks.integers("query_start_loc", query_start_loc, (rows + 1,), "[R + 1]", q.device)
    if block_size == 0:
        raise ValueError("k_cache: block_size is 0")
    most = columns * block_size
    lens = checks.lengths("context_lens", context_lens, rows, "[R]", q.device, most)
    starts: list[int] = query_start_loc.tolist()
    if starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
        raise ValueError("query_start_loc: expected 0 first and no decrease")
    if starts[-1] != q.shape[0]:
        raise ValueError(f"query_start_loc: ends at {starts[-1]}, but q has {q.shape[0]} tokens")
    used = torch.arange(columns, device=q.device) * block_size < context_lens[:, None]
    wrong = used & ((block_table < 0) | (block_table >= num_blocks))
    if wrong.any():
        row = int(wrong.any(1).nonzero()[0])
        raise ValueError(f"block_table: row {row} names a block outside 0..{num_blocks - 1}")
    context = PagedContext(
        block_table=block_table,
        context_lens=context_lens,
        query_start_loc=query_start_loc,
        max_query_len=max((b - a for a, b in pairwise(starts)), default=0),
        max_context_len=max(lens, default=0),
    )
    if context.max_query_len == 0 or context.max_context_len == 0:
        return _nothing(q)
    provider = providers.choose("context", q, k_cache, v_cache).implementation
    return provider.context_attention(q, k_cache, v_cache, context, scale)


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """The result of queries that see no key."""
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    return q.new_zeros(q.shape), lse
