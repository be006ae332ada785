"""The Triton kernel of system and context attention: groups of queries over paged or dense KV.

One program attends a tile of rows (the query heads of one KV head, token by token) to one split
of the group's keys, with the online softmax of FlashAttention (arXiv 2205.14135, Alg. 1). Lengths
and block tables are read on the device only.
"""

import triton
import triton.language as tl


@triton.jit
def _group_of(tile, starts_ptr, groups, HEADS_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    # The last group whose first tile, counting a spare one per group before it, is not beyond
    # `tile`; -1 before the first group.
    low = 0
    high = groups
    while low < high:
        middle = (low + high) // 2
        first = tl.load(starts_ptr + middle).to(tl.int32) * HEADS_PER_KV // BLOCK_M + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["groups", "tokens", "keys"])
def attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D], or [1, S, Hkv, D]
    v_ptr,  # as k_ptr
    table_ptr,  # [G, M], int32; these three are not read unless BLOCK_SIZE
    lens_ptr,  # [G], int32
    starts_ptr,  # [G + 1], int32: group g has the tokens starts[g] .. starts[g + 1]
    out_ptr,  # [splits, T, Hq, D]
    lse_ptr,  # [splits, Hq, T], float32
    q_strides,  # (token, head, channel)
    k_strides,  # (block, token, head, channel)
    v_strides,  # (block, token, head, channel)
    table_strides,  # (group, column)
    out_strides,  # (split, token, head, channel)
    lse_strides,  # (split, head, token)
    groups,
    tokens,  # T; read unless BLOCK_SIZE
    keys,  # S; read unless BLOCK_SIZE
    score_scale,  # scale * log2(e): the softmax is taken to base 2
    HEAD_SIZE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens per KV block, 0 for dense k and v of one group
    CAUSAL: tl.constexpr,  # aligned to the end: the last query sees every key
    ONE_TILE: tl.constexpr,  # no group has more rows than a tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    group = 0
    start = 0
    count = tokens
    length = keys
    if BLOCK_SIZE:
        group = tile
        if not ONE_TILE:
            group = _group_of(tile, starts_ptr, groups, HEADS_PER_KV, BLOCK_M)
            if group < 0:
                return
        start = tl.load(starts_ptr + group).to(tl.int32)
        count = tl.load(starts_ptr + group + 1).to(tl.int32) - start
        length = tl.load(lens_ptr + group).to(tl.int32)
        tile -= group
        if not ONE_TILE:
            tile -= start * HEADS_PER_KV // BLOCK_M
    rows = count * HEADS_PER_KV
    if tile * BLOCK_M >= rows:
        return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < rows
    query = row // HEADS_PER_KV
    end = length
    if CAUSAL:
        last = (tl.minimum(tile * BLOCK_M + BLOCK_M, rows) - 1) // HEADS_PER_KV
        end = length - count + 1 + last
    # Shares of the true length, not of the longest possible: a short row fills all programs too.
    share = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    begin = split * share
    end = tl.minimum(end, begin + share)
    # The launcher has written what "attended to nothing" reads as.
    if begin >= end:
        return

    # 64-bit: T * Hq * D and num_blocks * block_size * Hkv * D pass 2**31.
    token = (start + query).to(tl.int64)
    head = kv_head * HEADS_PER_KV + row % HEADS_PER_KV
    channel = tl.arange(0, BLOCK_D)
    channel_ok = channel < HEAD_SIZE
    at = (token * q_strides[0] + head * q_strides[1])[:, None] + (channel * q_strides[2])[None, :]
    q = tl.load(q_ptr + at, mask=row_ok[:, None] & channel_ok[None, :], other=0.0)
    k_base = k_ptr + kv_head * k_strides[2] + (channel.to(tl.int64) * k_strides[3])[:, None]
    v_base = v_ptr + kv_head * v_strides[2] + (channel.to(tl.int64) * v_strides[3])[None, :]
    table = table_ptr + group * table_strides[0]

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        key_ok = key < end
        slot = key.to(tl.int64)
        k_at = slot * k_strides[1]
        v_at = slot * v_strides[1]
        if BLOCK_SIZE:
            # Columns beyond the length are stale: never loaded, so never followed.
            column = key // BLOCK_SIZE * table_strides[1]
            block = tl.load(table + column, mask=key_ok, other=0).to(tl.int64)
            slot = (key % BLOCK_SIZE).to(tl.int64)
            k_at = block * k_strides[0] + slot * k_strides[1]
            v_at = block * v_strides[0] + slot * v_strides[1]
        # Zeros beyond the end: anything may lie there, and NaN * 0 is NaN.
        k = tl.load(k_base + k_at[None, :], mask=channel_ok[:, None] & key_ok[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * score_scale
        seen = key_ok[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= (length - count + query)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # -inf - -inf is NaN: a row that has seen nothing yet subtracts 0.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        norm = norm * decay + tl.sum(weights, 1)
        v = tl.load(v_base + v_at[:, None], mask=key_ok[:, None] & channel_ok[None, :], other=0.0)
        total = tl.dot(weights.to(v.dtype), v, acc=total * decay[:, None], input_precision="ieee")
        peak = new_peak

    # A row that saw nothing: 0 / 1 and, from its peak, -inf.
    norm = tl.where(norm == 0.0, 1.0, norm)
    total = total / norm[:, None]
    lse = (peak + tl.log2(norm)) * 0.6931471805599453
    at = out_ptr + split.to(tl.int64) * out_strides[0]
    at += (token * out_strides[1] + head * out_strides[2])[:, None]
    at += (channel * out_strides[3])[None, :]
    store_ok = row_ok[:, None] & channel_ok[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=store_ok)
    at = lse_ptr + split * lse_strides[0] + head * lse_strides[1] + token * lse_strides[2]
    tl.store(at, lse, mask=row_ok)
