"""``flash_attn_varlen_func`` over a paged cache in plain torch, for tests without a GPU."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.inputs import exact_attention


def reference_varlen(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor,
    block_table: Tensor,
    causal: bool,
    return_softmax_lse: bool = False,
) -> Any:
    """At most one query per row, or no mask: what decode needs. Float64, rounded once.

    Rows without queries and tokens of no row keep their content; a row without keys is out 0 and
    lse -inf.
    """
    starts, lens = cu_seqlens_q.tolist(), seqused_k.tolist()
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    for row, length in enumerate(lens):
        begin, end = starts[row : row + 2]
        assert 0 <= end - begin <= max_seqlen_q and length <= max_seqlen_k
        assert not causal or end - begin <= 1
        if begin == end:
            continue
        ids = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (cache[ids].flatten(0, 1)[:length] for cache in (k, v))
        exact, exact_lse = exact_attention(q[begin:end], keys, values)
        out[begin:end] = exact.to(out.dtype)
        lse[:, begin:end] = exact_lse.float()
    return (out, lse) if return_softmax_lse else out
