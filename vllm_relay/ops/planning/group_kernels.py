"""Grouping kernels of the plan on the GPU: which rows share which segment; see `launch`.

A row is a request of the batch, or padding of a CUDA graph.
"""

import triton
import triton.language as tl

from vllm_relay.ops.planning.score import STEP_VALUES, group_of, pack_score, pays


@triton.constexpr_function
def _checkpoint(i):  # type: ignore[no-untyped-def]
    """1, 1, 2, 3, 4, 6, 8, 12, ...: each power of two and the middle between it and the next."""
    return ((2 + (i & 1)) << (i // 2)) // 2


def checkpoints(columns: int) -> int:
    """Number of checkpoints that are at most ``columns``, which is at least 1."""
    i = 0
    while _checkpoint(i) <= columns:
        i += 1
    return i


@triton.jit
def _mix(block, column):  # type: ignore[no-untyped-def]
    """64-bit hash of (block id, column); the hash of a prefix is the sum over its columns."""
    x = block.to(tl.int64) * 0x1B873593CC9E2D51 + column.to(tl.int64) * 0x27D4EB2F165667C5
    x = (x ^ (x >> 29)) * 0x165667B19E3779F9
    return x ^ (x >> 32)


@triton.jit
def _clear(  # type: ignore[no-untyped-def]
    score_ptr,  # int64 [LEVELS, max_rows]
    index_ptr,  # int32 [LEVELS + DENSE, max_tokens]
    report_ptr,  # int64 [STATS + ...]
    row,
    max_rows,
    max_tokens,
    num_rows,
    num_tokens,
    LEVELS: tl.constexpr,
    DENSE: tl.constexpr,
    STATS: tl.constexpr,
    CHUNK_C: tl.constexpr,
):
    """Scores 0, places -1, numbers of the step 0; each row clears a part."""
    if row == 0:
        for i in tl.static_range(STATS):
            tl.store(report_ptr + i, tl.full([], 0, tl.int64))
    for level in tl.static_range(LEVELS):
        tl.store(score_ptr + level * max_rows + row, tl.full([], 0, tl.int64))
    for level in tl.static_range(LEVELS + DENSE):
        for base in range(row * CHUNK_C, num_tokens, num_rows * CHUNK_C):
            token = base + tl.arange(0, CHUNK_C)
            none = tl.full([CHUNK_C], -1, tl.int32)
            tl.store(index_ptr + level * max_tokens + token, none, mask=token < num_tokens)


@triton.jit
def _consecutive_blocks(blocks_ptr, depth, num_columns, CHUNK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of leading blocks of a row, blocks_ptr [depth], with consecutive ids."""
    run = depth
    first = tl.load(blocks_ptr)
    for base in range(0, depth, CHUNK_C):
        column = base + tl.arange(0, CHUNK_C)
        block = tl.load(blocks_ptr + column, mask=column < depth, other=0)
        apart = (column < depth) & (block != first + column)
        run = tl.minimum(run, tl.min(tl.where(apart, column, num_columns)))
    return run


@triton.jit(do_not_specialize=STEP_VALUES)
def hash_prefixes_kernel(  # type: ignore[no-untyped-def]
    table_ptr,  # int32 [num_rows, num_columns], block ids
    seq_lens_ptr,  # int32 [num_rows]
    starts_ptr,  # int32 [num_rows + 1], query_start_loc
    depth_ptr,  # int32 [max_rows], out: full computed blocks
    hash_ptr,  # int64 [CHECKPOINTS, max_rows], out; 0: fewer blocks than the checkpoint
    score_ptr,  # int64 [LEVELS, max_rows], cleared
    consecutive_ptr,  # int32 [max_rows], out where DENSE
    index_ptr,  # int32 [LEVELS + DENSE, max_tokens], cleared
    report_ptr,  # int64 [STATS + ...], cleared
    table_stride,
    max_rows,
    max_tokens,
    num_rows,
    num_columns,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens; 0: none
    LEVELS: tl.constexpr,
    DENSE: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    STATS: tl.constexpr,
    CHUNK_C: tl.constexpr,
):
    """hash[i, row] = sum of _mix(block, column) over columns < checkpoint(i)."""
    row = tl.program_id(0)
    _clear(
        score_ptr, index_ptr, report_ptr, row, max_rows, max_tokens, num_rows, num_tokens,
        LEVELS, DENSE, STATS, CHUNK_C,
    )  # fmt: skip
    queries = tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row)
    length = tl.load(seq_lens_ptr + row)
    # Padding has no query and no length.
    computed = tl.where(queries > 0, tl.maximum(length - queries, 0), 0)
    if WINDOW > 0:
        computed = tl.where(length <= WINDOW, computed, 0)
    depth = tl.minimum(computed // BLOCK_SIZE, num_columns)
    blocks_ptr = table_ptr + row.to(tl.int64) * table_stride

    # The checkpoints of the first chunk are sums over its parts: one load for all of them.
    lane = tl.arange(0, CHUNK_C)
    block = tl.load(blocks_ptr + lane, mask=lane < depth, other=1)
    depth = tl.minimum(depth, tl.min(tl.where(block <= 0, lane, num_columns)))
    mixed = _mix(block, lane)
    total = tl.sum(tl.where(lane < depth, mixed, 0))
    for i in tl.static_range(CHECKPOINTS):
        columns = _checkpoint(i)
        if _checkpoint(i) <= CHUNK_C:
            value = tl.sum(tl.where(lane < columns, mixed, 0)) | 1
        else:
            for base in range(_checkpoint(i - 1), tl.minimum(columns, depth), CHUNK_C):
                column = base + lane
                ok = (column < columns) & (column < depth)
                block = tl.load(blocks_ptr + column, mask=ok, other=1)
                depth = tl.minimum(depth, tl.min(tl.where(block <= 0, column, num_columns)))
                total += tl.sum(tl.where(ok, _mix(block, column), 0))
            value = total | 1
        value = tl.where(depth >= columns, value, 0)
        tl.store(hash_ptr + i * max_rows + row, value)
    tl.store(depth_ptr + row, depth)
    if DENSE:
        run = _consecutive_blocks(blocks_ptr, depth, num_columns, CHUNK_C)
        tl.store(consecutive_ptr + row, run)


@triton.jit
def _common_blocks(ours_ptr, theirs_ptr, start, end, CHUNK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """First column of [start, end) where two rows' blocks, [end] each, differ; or end."""
    common = end
    column = start
    while column < common:
        at = column + tl.arange(0, CHUNK_C)
        ours = tl.load(ours_ptr + at, mask=at < end, other=0)
        differ = ours != tl.load(theirs_ptr + at, mask=at < end, other=-1)
        common = tl.minimum(common, tl.min(tl.where(differ, at, end)))
        column += CHUNK_C
    return common


@triton.jit(do_not_specialize=STEP_VALUES)
def match_leaders_kernel(  # type: ignore[no-untyped-def]
    table_ptr,  # int32 [num_rows, num_columns]
    depth_ptr,  # int32 [max_rows]
    hash_ptr,  # int64 [CHECKPOINTS, max_rows]
    leader_ptr,  # int32 [LEVELS, max_rows], out; -1: none
    common_ptr,  # int32 [LEVELS, max_rows], out: blocks in common with the leader
    score_ptr,  # int64 [LEVELS, max_rows], of the level above
    table_stride,
    max_rows,
    num_rows,
    min_saved,
    LEVEL: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    CHUNK_R: tl.constexpr,
    CHUNK_C: tl.constexpr,
):
    """leader = first row with this row's hash at the checkpoint that maximises (n - 1) / n * depth
    for n rows with that hash; depth counts from the end of the row's segment one level above."""
    row = tl.program_id(0)
    depth = tl.load(depth_ptr + row)
    above = (LEVEL - 1) * max_rows
    owner, start = -1, 0
    if LEVEL > 0:
        owner, start = group_of(leader_ptr, common_ptr, score_ptr, above, row, row >= 0, min_saved)
        depth = tl.where(owner >= 0, depth, 0)

    leader = tl.full([], -1, tl.int32)
    # Most reads saved per row so far: `most` / `among`.
    most = tl.full([], 0, tl.int64)
    among = tl.full([], 1, tl.int32)
    for i in tl.static_range(CHECKPOINTS):
        columns = _checkpoint(i)
        if (columns > start) & (columns <= depth):
            mine = tl.load(hash_ptr + i * max_rows + row)
            count = tl.full([], 0, tl.int32)
            first = num_rows
            for base in range(0, num_rows, CHUNK_R):
                other = base + tl.arange(0, CHUNK_R)
                ok = other < num_rows
                same = tl.load(hash_ptr + i * max_rows + other, mask=ok, other=0) == mine
                if LEVEL > 0:
                    theirs, _ = group_of(
                        leader_ptr, common_ptr, score_ptr, above, other, ok, min_saved
                    )
                    same &= theirs == owner
                count += tl.sum(same.to(tl.int32))
                first = tl.minimum(first, tl.min(tl.where(same, other, num_rows)))
            saved = (count - 1).to(tl.int64) * (columns - start)
            if saved * among > most * count:
                most = saved
                among = count
                leader = first

    common = tl.full([], 0, tl.int32)
    if leader >= 0:
        end = tl.minimum(depth, tl.load(depth_ptr + leader))
        ours_ptr = table_ptr + row.to(tl.int64) * table_stride
        theirs_ptr = table_ptr + leader.to(tl.int64) * table_stride
        common = _common_blocks(ours_ptr, theirs_ptr, start, end, CHUNK_C)
    tl.store(leader_ptr + LEVEL * max_rows + row, leader)
    tl.store(common_ptr + LEVEL * max_rows + row, common)


@triton.jit(do_not_specialize=STEP_VALUES)
def score_groups_kernel(  # type: ignore[no-untyped-def]
    leader_ptr,  # int32 [LEVELS, max_rows]
    common_ptr,  # int32 [LEVELS, max_rows]
    score_ptr,  # int64 [LEVELS, max_rows], out at leaders; see pack_score
    max_rows,
    num_rows,
    min_saved,
    LEVEL: tl.constexpr,
    CHUNK_R: tl.constexpr,
):
    """score[leader] = max over its rows' depths of (rows that reach the depth - 1) * depth."""
    row = tl.program_id(0)
    here = LEVEL * max_rows
    leader = tl.load(leader_ptr + here + row)
    if leader >= 0:
        depth = tl.load(common_ptr + here + row)
        start = 0
        if LEVEL > 0:
            _, start = group_of(
                leader_ptr, common_ptr, score_ptr, here - max_rows, row, row >= 0, min_saved
            )
        members = tl.full([], 0, tl.int32)
        for base in range(0, num_rows, CHUNK_R):
            other = base + tl.arange(0, CHUNK_R)
            ok = other < num_rows
            same = tl.load(leader_ptr + here + other, mask=ok, other=-1) == leader
            same &= tl.load(common_ptr + here + other, mask=ok, other=-1) >= depth
            members += tl.sum(same.to(tl.int32))
        saved = (members - 1).to(tl.int64) * (depth - start)
        if saved > 0:
            # A maximum does not depend on the order of arrival.
            tl.atomic_max(score_ptr + here + leader, pack_score(saved, depth))


@triton.jit
def _groups_from(score_ptr, least, num_rows, min_saved, CHUNK_R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of groups whose score is at least ``least``."""
    count = tl.full([], 0, tl.int32)
    for base in range(0, num_rows, CHUNK_R):
        row = base + tl.arange(0, CHUNK_R)
        score = tl.load(score_ptr + row, mask=row < num_rows, other=0)
        count += tl.sum((pays(score, min_saved) & (score >= least)).to(tl.int32))
    return count


@triton.jit(do_not_specialize=STEP_VALUES)
def keep_groups_kernel(  # type: ignore[no-untyped-def]
    score_ptr,  # int64 [LEVELS, max_rows]; 0 afterwards at leaders of other groups
    max_rows,
    num_rows,
    num_groups,
    min_saved,
    LEVEL: tl.constexpr,
    CHUNK_R: tl.constexpr,
):
    """The num_groups groups that save most stay, of equal ones the first; one program."""
    scores_ptr = score_ptr + LEVEL * max_rows
    # The largest score that more than num_groups groups have; 0: there are no more, and all stay.
    least = tl.full([], 0, tl.int64)
    if _groups_from(scores_ptr, least, num_rows, min_saved, CHUNK_R) > num_groups:
        for i in range(63):
            more = least | (tl.full([], 1, tl.int64) << (62 - i))
            if _groups_from(scores_ptr, more, num_rows, min_saved, CHUNK_R) > num_groups:
                least = more
        left = num_groups - _groups_from(scores_ptr, least + 1, num_rows, min_saved, CHUNK_R)
        for base in range(0, num_rows, CHUNK_R):
            row = base + tl.arange(0, CHUNK_R)
            score = tl.load(scores_ptr + row, mask=row < num_rows, other=0)
            equal = (score == least).to(tl.int32)
            late = (equal > 0) & (tl.cumsum(equal) > left)
            left -= tl.sum(equal)
            drop = (row < num_rows) & (late | (score < least))
            tl.store(scores_ptr + row, tl.zeros([CHUNK_R], tl.int64), mask=drop)
