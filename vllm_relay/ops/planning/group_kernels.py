"""Who groups with whom: the first three kernels of the plan on the GPU; see `plan`."""

import triton
import triton.language as tl

# These change with every step: no kernel is compiled anew for a value of them.
HOST_NUMBERS = ["num_rows", "num_columns", "num_tokens", "min_saved", "num_groups", "count"]


@triton.constexpr_function
def _checkpoint(i):  # type: ignore[no-untyped-def]
    """1, 1, 2, 3, 4, 6, 8, 12, ...: each power of two and what lies half-way to the next."""
    return ((2 + (i & 1)) << (i // 2)) // 2


def checkpoints(columns: int) -> int:
    """How many of them are at most ``columns``, which is at least 1."""
    i = 0
    while _checkpoint(i) <= columns:
        i += 1
    return i


@triton.jit
def _mix(block, column):  # type: ignore[no-untyped-def]
    """A 64-bit hash of (block id, column); the hash of a prefix is the sum over its columns."""
    x = block.to(tl.int64) * 0x1B873593CC9E2D51 + column.to(tl.int64) * 0x27D4EB2F165667C5
    x = (x ^ (x >> 29)) * 0x165667B19E3779F9
    return x ^ (x >> 32)


@triton.jit
def member(leader_ptr, common_ptr, best_ptr, row, ok, min_saved):  # type: ignore[no-untyped-def]
    """Leader of the group that `row` is in and the blocks it then has behind it, or (-1, 0).

    All pointers are at one level; `row` and `ok` are scalars or vectors.
    """
    leader = tl.load(leader_ptr + row, mask=ok, other=-1)
    led = ok & (leader >= 0)
    common = tl.load(common_ptr + row, mask=led, other=0)
    best = tl.load(best_ptr + tl.maximum(leader, 0), mask=led, other=0)
    depth = (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
    inside = led & (best >> 32 >= min_saved) & (best > 0) & (common >= depth)
    return tl.where(inside, leader, -1), tl.where(inside, depth, 0)


@triton.jit(do_not_specialize=HOST_NUMBERS)
def sign_kernel(  # type: ignore[no-untyped-def]
    table_ptr,  # [R, M]
    seq_lens_ptr,  # [R]
    starts_ptr,  # [R + 1]
    depth_ptr,  # [R]
    hash_ptr,  # [CHECKPOINTS, R]
    best_ptr,  # [LEVELS, R]
    run_ptr,  # [R]
    index_ptr,  # [LEVELS + DENSE, T]
    report_ptr,  # [STATS + ...]
    table_stride,
    row_stride,
    token_stride,
    num_rows,
    num_columns,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    DENSE: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    STATS: tl.constexpr,
    CHUNK_C: tl.constexpr,
):
    row = tl.program_id(0)
    if row == 0:
        for i in tl.static_range(STATS):
            tl.store(report_ptr + i, tl.full([], 0, tl.int64))
    lane = tl.arange(0, CHUNK_C)
    for level in tl.static_range(LEVELS):
        tl.store(best_ptr + level * row_stride + row, tl.full([], 0, tl.int64))
    for level in tl.static_range(LEVELS + DENSE):
        for base in range(row * CHUNK_C, num_tokens, num_rows * CHUNK_C):
            at = index_ptr + level * token_stride + base + lane
            tl.store(at, tl.full([CHUNK_C], -1, tl.int32), mask=base + lane < num_tokens)

    queries = tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row)
    computed = tl.load(seq_lens_ptr + row) - queries
    # Padding has no query and no length.
    computed = tl.where(queries > 0, tl.maximum(computed, 0), 0)
    depth = tl.minimum(computed // BLOCK_SIZE, num_columns)
    blocks_ptr = table_ptr + row.to(tl.int64) * table_stride

    # The checkpoints of the first chunk are sums over its parts: one load for all of them.
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
                at = base + lane
                ok = (at < columns) & (at < depth)
                block = tl.load(blocks_ptr + at, mask=ok, other=1)
                depth = tl.minimum(depth, tl.min(tl.where(block <= 0, at, num_columns)))
                total += tl.sum(tl.where(ok, _mix(block, at), 0))
            value = total | 1
        # 0: the row has not so many full computed blocks.
        value = tl.where(depth >= columns, value, 0)
        tl.store(hash_ptr + i * row_stride + row, value)
    tl.store(depth_ptr + row, depth)
    if DENSE:
        # Leading blocks that follow one another in memory.
        run = depth
        first = tl.load(blocks_ptr)
        for base in range(0, depth, CHUNK_C):
            at = base + lane
            block = tl.load(blocks_ptr + at, mask=at < depth, other=0)
            apart = (at < depth) & (block != first + at)
            run = tl.minimum(run, tl.min(tl.where(apart, at, num_columns)))
        tl.store(run_ptr + row, run)


@triton.jit(do_not_specialize=HOST_NUMBERS)
def match_kernel(  # type: ignore[no-untyped-def]
    table_ptr,  # [R, M]
    depth_ptr,  # [R]
    hash_ptr,  # [CHECKPOINTS, R]
    leader_ptr,  # [LEVELS, R]
    common_ptr,  # [LEVELS, R]
    best_ptr,  # [LEVELS, R]
    table_stride,
    row_stride,
    num_rows,
    min_saved,
    LEVEL: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    CHUNK_R: tl.constexpr,
    CHUNK_C: tl.constexpr,
):
    row = tl.program_id(0)
    depth = tl.load(depth_ptr + row)
    # The level above, whose group the row must share and whose segment it has behind it.
    above = (LEVEL - 1) * row_stride
    owner, start = -1, 0
    if LEVEL > 0:
        owner, start = member(
            leader_ptr + above, common_ptr + above, best_ptr + above, row, row >= 0, min_saved
        )
        depth = tl.where(owner >= 0, depth, 0)

    leader = tl.full([], -1, tl.int32)
    # The reads saved per row so far: `most` / `among`.
    most = tl.full([], 0, tl.int64)
    among = tl.full([], 1, tl.int32)
    for i in tl.static_range(CHECKPOINTS):
        columns = _checkpoint(i)
        if (columns > start) & (columns <= depth):
            mine = tl.load(hash_ptr + i * row_stride + row)
            count = tl.full([], 0, tl.int32)
            first = num_rows
            for base in range(0, num_rows, CHUNK_R):
                other = base + tl.arange(0, CHUNK_R)
                ok = other < num_rows
                same = tl.load(hash_ptr + i * row_stride + other, mask=ok, other=0) == mine
                if LEVEL > 0:
                    theirs, _ = member(
                        leader_ptr + above, common_ptr + above, best_ptr + above, other, ok,
                        min_saved,
                    )  # fmt: skip
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
        mine_ptr = table_ptr + row.to(tl.int64) * table_stride
        theirs_ptr = table_ptr + leader.to(tl.int64) * table_stride
        common = end
        column = start
        while column < common:
            at = column + tl.arange(0, CHUNK_C)
            ours = tl.load(mine_ptr + at, mask=at < end, other=0)
            differ = ours != tl.load(theirs_ptr + at, mask=at < end, other=-1)
            common = tl.minimum(common, tl.min(tl.where(differ, at, end)))
            column += CHUNK_C
    at = LEVEL * row_stride + row
    tl.store(leader_ptr + at, leader)
    tl.store(common_ptr + at, common)


@triton.jit(do_not_specialize=HOST_NUMBERS)
def score_kernel(  # type: ignore[no-untyped-def]
    leader_ptr,  # [LEVELS, R]
    common_ptr,  # [LEVELS, R]
    best_ptr,  # [LEVELS, R]: saved block reads << 32 | 2**31 - 1 - depth
    row_stride,
    num_rows,
    min_saved,
    LEVEL: tl.constexpr,
    CHUNK_R: tl.constexpr,
):
    row = tl.program_id(0)
    here = LEVEL * row_stride
    leader = tl.load(leader_ptr + here + row)
    if leader >= 0:
        depth = tl.load(common_ptr + here + row)
        start = 0
        if LEVEL > 0:
            above = here - row_stride
            _, start = member(
                leader_ptr + above, common_ptr + above, best_ptr + above, row, row >= 0, min_saved
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
            # Of equal depths the smaller: it has more members. A maximum has no order of arrival.
            packed = (saved << 32) | (0x7FFFFFFF - depth).to(tl.int64)
            tl.atomic_max(best_ptr + here + leader, packed)
