"""Context attention: each request against its own tokens, paged and causal, with the LSE.

`plan_context` reads the lengths and lays out the indices once per step, `run_context` runs per
layer; `context_attention` is both in one call.
"""

from torch import Tensor

from vllm_relay.ops import checks
from vllm_relay.ops.context_plan import ContextPlan, plan_context
from vllm_relay.ops.cpu.context import run_context

__all__ = ["ContextPlan", "context_attention", "plan_context", "run_context"]


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
    the last query sees all of it. Plain torch in float32 on any device; reads the lengths on the
    host (a sync on CUDA).

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
        ValueError: a shape, dtype, device, length or block id does not fit; names the argument.
    """
    checks.query(q, 3, "[T, Hq, D]")
    layout = "[num_blocks, block_size, Hkv, D]"
    checks.key_value(q, k_cache, v_cache, 4, layout, ("k_cache", "v_cache"))
    checks.rank("block_table", block_table, 2, "[R, M]")
    if block_table.device != q.device:
        raise ValueError(f"block_table: device {block_table.device} differs from q's {q.device}")
    plan = plan_context(
        block_table,
        context_lens,
        query_start_loc,
        num_blocks=k_cache.shape[0],
        block_size=k_cache.shape[1],
    )
    if plan.tokens != q.shape[0]:
        raise ValueError(f"query_start_loc: ends at {plan.tokens}, but q has {q.shape[0]} tokens")
    scale = checks.scale_or_default(scale, q.shape[-1])
    return run_context(q, k_cache, v_cache, plan, scale)
