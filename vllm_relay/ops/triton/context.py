"""Context attention in Triton: causal, paged, any number of queries per row, keys split.

Exercised under Triton's interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from torch import Tensor

from vllm_relay.ops.triton.attention import attend


def context_attention(
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
    """Arguments as `vllm_relay.ops.context_attention`, checked there; no sync, so fit for graphs.

    max_query_len and max_context_len (host integers) are at least those of any row. They shape the
    launch; with max_query_len 1, no row may have more than one query.
    """
    return attend(
        q,
        k_cache,
        v_cache,
        scale,
        table=block_table,
        lens=context_lens.contiguous(),
        starts=query_start_loc.contiguous(),
        max_tokens=max_query_len,
        max_len=max_context_len,
        # A single query sees its whole context.
        causal=max_query_len > 1,
    )
