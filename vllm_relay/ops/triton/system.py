"""System attention in Triton: the queries of a group as the rows of one product, KV read once.

Exercised under Triton's interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from torch import Tensor

from vllm_relay.ops import checks
from vllm_relay.ops.triton.attention import attend


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.system_attention`, checked there; no stride costs a copy."""
    return attend(q, k, v, scale, max_tokens=q.shape[0], max_len=k.shape[0])


def paged_system_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    segment_lens: Tensor,
    cu_tokens: Tensor,
    scale: float,
    max_tokens: int,
    max_len: int,
) -> tuple[Tensor, Tensor]:
    """System attention of several groups at once, each over its own segment in paged KV.

    Lengths, offsets and tables are read on the device only: no sync, and a captured graph may be
    replayed with other values. Their values are not checked.

    Args:
        q: [T, Hq, D], bf16, fp16 or fp32; the tokens of a group one after another.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], q's dtype, any strides.
        block_table: [G, M] int32; only the first ceil(segment_len / block_size) are read.
        segment_lens: [G] int32, contiguous; 0: no segment.
        cu_tokens: [G + 1] int32, contiguous: group g has the tokens q[cu[g] : cu[g + 1]].
        scale: multiplies the scores.
        max_tokens: at least the tokens of any group. Beyond it, tokens go without attention.
        max_len: at least the keys of any segment; shapes the launch.

    Returns:
        out [T, Hq, D] in q's dtype and lse [Hq, T] float32, natural logarithm; 0 and -inf for
        tokens of no group or of a group without segment.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    checks.query(q, 3, "[T, Hq, D]")
    layout = "[num_blocks, block_size, Hkv, D]"
    checks.key_value(q, k_cache, v_cache, 4, layout, ("k_cache", "v_cache"))
    checks.rank("segment_lens", segment_lens, 1, "[G]")
    groups = segment_lens.shape[0]
    checks.integers("segment_lens", segment_lens, (groups,), "[G]", q.device)
    checks.integers("cu_tokens", cu_tokens, (groups + 1,), "[G + 1]", q.device)
    checks.rank("block_table", block_table, 2, "[G, M]")
    columns = block_table.shape[1]
    checks.integers("block_table", block_table, (groups, columns), "[G, M]", q.device)
    for name, x in (("segment_lens", segment_lens), ("cu_tokens", cu_tokens)):
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor")
    return attend(
        q,
        k_cache,
        v_cache,
        scale,
        table=block_table,
        lens=segment_lens,
        starts=cu_tokens,
        max_tokens=max_tokens,
        max_len=max_len,
    )
