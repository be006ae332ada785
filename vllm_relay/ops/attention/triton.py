"""Both attention ops in Triton: KV read once per group, paged or dense, keys split.

No call reads a length on the host, and no stride costs a copy: fit for CUDA graphs.
"""

import functools
import math
import os
from typing import Any

import torch
import triton
from torch import Tensor

from vllm_relay.ops.attention import providers
from vllm_relay.ops.attention.providers import PagedContext
from vllm_relay.ops.attention.triton_kernel import attend_kernel
from vllm_relay.ops.fusion.triton import merge_splits

# Keys that a split should hold at least: below, the merge costs more than it gains.
_SPLIT_KEYS = 256
# Bounds the float32 partials: 32 of [T, Hq, D].
_MOST_SPLITS = 32


def unusable(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take these tensors, or None; any strides will do."""
    if q.shape[-1] > 256:
        return f"needs a head size up to 256, not {q.shape[-1]}"
    if q.is_cuda:
        return providers.old_device(q)
    if q.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return "needs CUDA tensors, or TRITON_INTERPRET=1 for the interpreter"
    if q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    return None


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.system_attention`, checked there."""
    return _attend(q, k, v, scale)


def paged_system_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
) -> tuple[Tensor, Tensor]:
    """System attention of all groups of a level, the rows of ``context``, in one launch.

    Tensors as in `vllm_relay.ops.context_attention`. A captured graph may be replayed with other
    lengths, offsets and block ids. They are not checked. With max_query_len less than the tokens
    of a group, some get no attention. Tokens of no group or of a group without keys have out 0
    and lse -inf.
    """
    return _attend(q, k_cache, v_cache, scale, context)


def context_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.context_attention`, checked there.

    With max_query_len 1, no request may have more than one query.
    """
    # A single query sees its whole context.
    return _attend(q, k_cache, v_cache, scale, context, causal=context.max_query_len > 1)


@functools.cache
def _processors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _tile(rows: int, head_size: int, itemsize: int) -> dict[str, int]:
    """Launch options for groups of at most `rows` rows.

    Chosen so that nothing spills on sm_80 and sm_90, and that shared memory fits the 99 KiB of
    sm_86 and sm_89 where sm_80's code runs.
    """
    block_d = max(16, triton.next_power_of_2(head_size))
    block_m = max(16, triton.next_power_of_2(rows))
    if itemsize == 4:
        # No tensor cores: products are unrolled, and larger tiles spill.
        block_m, block_n, warps, stages = 16, 32, 8, 2
    elif block_d > 128:
        block_m, block_n, warps, stages = min(block_m, 32), 32, 4, 2
    else:
        block_m, block_n = min(block_m, 128), 64
        # With three stages, the block table is read an iteration before the keys that it names.
        warps, stages = 8 if block_m == 128 else 4, 3
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d}
    return {**tile, "num_warps": warps, "num_stages": stages}


def _num_splits(q: Tensor, programs: int, max_len: int) -> int:
    """Enough splits for two waves of programs; from host values only."""
    target = 2 * _processors(q.device.index) if q.is_cuda else 1
    return max(1, min(target // programs, max_len // _SPLIT_KEYS, _MOST_SPLITS))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    context: PagedContext | None = None,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention with its LSE; both contiguous. Without a context, k and v are dense."""
    tokens, heads, head_size = q.shape
    kv_heads = k.shape[-2]
    per_kv = heads // kv_heads
    groups, max_tokens, max_len = 1, tokens, k.shape[0]
    if context is not None:
        groups = context.context_lens.shape[0]
        max_tokens, max_len = context.max_query_len, context.max_context_len
    if tokens == 0 or groups == 0 or max_tokens <= 0 or max_len <= 0:
        return q.new_zeros(q.shape), q.new_full((heads, tokens), -torch.inf, dtype=torch.float32)
    max_rows = min(max_tokens, tokens) * per_kv
    options = _tile(max_rows, head_size, q.element_size())
    block_m = options["BLOCK_M"]
    busy = tiles = triton.cdiv(tokens * per_kv, block_m)
    one_tile = max_rows <= block_m
    if context is None:
        block_size, table, lens, starts = 0, q, q, q  # the last three are not read
        k, v = k.unsqueeze(0), v.unsqueeze(0)
    else:
        # Every group may end in a tile that it does not fill.
        tiles = groups if one_tile else tokens * per_kv // block_m + groups
        busy = max(busy, min(groups, tokens))
        table = context.block_table
        lens, starts = context.context_lens.contiguous(), context.query_start_loc.contiguous()
        # One block per group may be of any size: rounded up, not every size is a new kernel.
        block_size = k.shape[1] if table.shape[1] > 1 else triton.next_power_of_2(k.shape[1])
    splits = _num_splits(q, busy * kv_heads, max_len)
    # Programs with nothing to attend to write nothing, so that is written beforehand: to the LSE of
    # the splits, or else to the results.
    lses = q.new_full((splits, heads, tokens), -torch.inf, dtype=torch.float32)
    if splits > 1:
        out, lse = q.new_empty(q.shape), lses.new_empty((heads, tokens))
        outs = lses.new_empty((splits, *q.shape))
    else:
        out, lse = q.new_zeros(q.shape), lses[0]
        outs = out.unsqueeze(0)
    tensors = (q, k, v, table, lens, starts, outs, lses)
    strides = [x.stride() for x in (q, k, v, table, outs, lses)]
    kernel: Any = attend_kernel
    kernel[(tiles, kv_heads, splits)](
        *tensors,
        *strides,
        groups,
        tokens,
        k.shape[1],
        scale * math.log2(math.e),
        HEAD_SIZE=head_size,
        HEADS_PER_KV=per_kv,
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        ONE_TILE=one_tile,
        **options,
    )
    if splits > 1:
        merge_splits(outs, lses, out, lse)
    return out, lse
