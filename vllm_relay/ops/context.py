"""Context attention: each request against its own tokens, paged and causal, with the LSE.

`context_attention` checks a step and picks a provider. The plain one can also be used in two parts:
`plan_context` reads the lengths and lays out the indices once per step, `run_context` runs per
layer.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vllm_relay.ops import checks, flash_attn, providers, xformers
from vllm_relay.ops.context_plan import ContextPlan, plan_context
from vllm_relay.ops.cpu import attention as native
from vllm_relay.ops.cpu.context import run_context

__all__ = [
    "ContextPlan",
    "context_attention",
    "plan_context",
    "run_context",
    "torch_context_attention",
]


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
    """Causal attention of each row's queries to its own blocks, aligned to the end.

    Query i of the n of a row sees the first `context_len - n + 1 + i` tokens of its context, so
    the last query sees all of it. Reads the lengths and checks the block ids on the host (a sync
    on CUDA).

    Args:
        q: [T, Hq, D], bf16, fp16 or fp32; rows one after another.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], q's dtype, any strides. What lies
            beyond a row's context may be anything, NaN included.
        block_table: [R, M] int32; only the first ceil(context_len / block_size) are read.
        context_lens: [R] int32, 0 .. M * block_size.
        query_start_loc: [R + 1] int32: row r has the queries q[loc[r] : loc[r + 1]].
        scale: multiplies the scores; D ** -0.5 where None.

    Returns:
        out [T, Hq, D] in q's dtype and lse [Hq, T] float32, natural logarithm. A query that sees
        nothing has out 0 and lse -inf.

    Raises:
        ValueError: a shape, dtype, device, length or block id does not fit; names the argument. Or
            the provider that was forced (`vllm_relay.ops.providers`) cannot take the call.
    """
    checks.query(q, 3, "[T, Hq, D]")
    layout = "[num_blocks, block_size, Hkv, D]"
    checks.key_value(q, k_cache, v_cache, 4, layout, ("k_cache", "v_cache"))
    checks.rank("block_table", block_table, 2, "[R, M]")
    scale = checks.scale_or_default(scale, q.shape[-1])
    queries, context = _check_step(q, k_cache, block_table, context_lens, query_start_loc)
    if queries == 0 or context == 0:
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        return q.new_zeros(q.shape), lse
    attend = providers.choose("context", q, k_cache, v_cache).fn
    return attend(
        q,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        query_start_loc,
        scale,
        queries,
        context,
    )


def _check_step(
    q: Tensor, k_cache: Tensor, block_table: Tensor, context_lens: Tensor, query_start_loc: Tensor
) -> tuple[int, int]:
    """The most queries and the longest context of a row, once all values are known to fit."""
    num_blocks, block_size = k_cache.shape[:2]
    rows, columns = block_table.shape
    checks.integers("block_table", block_table, (rows, columns), "[R, M]", q.device)
    checks.integers("context_lens", context_lens, (rows,), "[R]", q.device)
    checks.integers("query_start_loc", query_start_loc, (rows + 1,), "[R + 1]", q.device)
    if block_size == 0:
        raise ValueError("k_cache: block_size is 0")
    context = checks.lengths("context_lens", context_lens, columns * block_size)
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
    return max((b - a for a, b in pairwise(starts)), default=0), max(context, default=0)


def torch_context_attention(
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
    """The same on any device in plain torch and float32; reads the lengths on the host."""
    num_blocks, block_size = k_cache.shape[:2]
    plan = plan_context(
        block_table, context_lens, query_start_loc, num_blocks=num_blocks, block_size=block_size
    )
    return run_context(q, k_cache, v_cache, plan, scale)


def _triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, *step: Any) -> tuple[Tensor, Tensor]:
    # Imported here: triton is absent or useless where there is no GPU.
    from vllm_relay.ops.triton import context

    return context.context_attention(q, k_cache, v_cache, *step)


providers.register("context", "native", native.context_attention, native.usable)
providers.register("context", "cpu", torch_context_attention, providers.not_cpu)
providers.register("context", "torch", torch_context_attention)
providers.register("context", "triton", _triton, providers.not_triton)
providers.register("context", "flash-attn", flash_attn.context_attention, flash_attn.context_usable)
providers.register("context", "xformers", xformers.context_attention, xformers.context_usable)
