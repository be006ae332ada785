"""The layout of the groups: the last kernel of the plan on the GPU; see `plan`."""

import triton
import triton.language as tl

from vllm_relay.ops.planning.group_kernels import HOST_NUMBERS, member


@triton.jit
def _report(report_ptr, item, value, count, STATS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to a number of this step and, where counted, to its total over all steps."""
    tl.atomic_add(report_ptr + item, value)
    tl.atomic_add(report_ptr + STATS + 2 + item, value * count)


@triton.jit
def _most_saving_run(best_ptr, run_ptr, leader, num_rows, min_saved):  # type: ignore[no-untyped-def]
    """The most that a group of these leaders saves whose blocks follow one another, and whose."""
    best = tl.load(best_ptr + leader, mask=leader < num_rows, other=0)
    depth = (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
    run = tl.load(run_ptr + leader, mask=leader < num_rows, other=0)
    kept = (best > 0) & (best >> 32 >= min_saved) & (run >= depth)
    best = tl.where(kept, best, 0)
    top = tl.max(best)
    return top, tl.min(tl.where(kept & (best == top), leader, num_rows))


@triton.jit
def _place(leader, dense):  # type: ignore[no-untyped-def]
    """What groups are ordered by: their leaders, the dense group's first."""
    return tl.where(leader == dense, -1, leader)


@triton.jit(do_not_specialize=HOST_NUMBERS)
def settle_kernel(  # type: ignore[no-untyped-def]
    table_ptr,  # [R, M]
    seq_lens_ptr,  # [R]
    starts_ptr,  # [R + 1]
    leader_ptr,  # [LEVELS, R]
    common_ptr,  # [LEVELS, R]
    best_ptr,  # [LEVELS, R]
    run_ptr,  # [R]
    cu_tokens_ptr,  # [LEVELS, G + 1]
    segment_lens_ptr,  # [LEVELS, G]
    segment_table_ptr,  # [LEVELS, G, M]
    index_ptr,  # [LEVELS + DENSE, T]
    dense_ptr,  # [2, 3]
    context_table_ptr,  # [R, M]
    context_lens_ptr,  # [R]
    report_ptr,  # [STATS + 2 + STATS]
    table_stride,
    row_stride,
    token_stride,
    cu_stride,
    group_stride,
    segment_stride,
    context_stride,
    num_rows,
    num_columns,
    num_groups,
    min_saved,
    count,
    BLOCK_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    DENSE: tl.constexpr,
    STATS: tl.constexpr,
    CHUNK_R: tl.constexpr,
    CHUNK_C: tl.constexpr,
):
    row = tl.program_id(0)
    level = tl.program_id(1)
    here = level * row_stride
    leader, depth = member(
        leader_ptr + here, common_ptr + here, best_ptr + here, row, row >= 0, min_saved
    )
    start = tl.full([], 0, tl.int32)
    if level > 0:
        above = here - row_stride
        _, start = member(
            leader_ptr + above, common_ptr + above, best_ptr + above, row, row >= 0, min_saved
        )

    # The leader of the group that is attended as dense KV, if any: of the outermost level, and of
    # groups whose blocks follow one another the one that saves most. Its group comes first.
    dense = tl.full([], -2, tl.int32)
    if DENSE and level == 0:
        most = tl.full([], 0, tl.int64)
        for base in range(0, num_rows, CHUNK_R):
            other = base + tl.arange(0, CHUNK_R)
            top, at = _most_saving_run(best_ptr, run_ptr, other, num_rows, min_saved)
            if top > most:
                most = top
                dense = at

    before = tl.full([], 0, tl.int32)  # queries of rows ahead of this one
    begin = tl.full([], 0, tl.int32)  # and of the groups ahead of its group
    members = tl.full([], 0, tl.int32)  # and of its group
    total = tl.full([], 0, tl.int32)
    rank = tl.full([], 0, tl.int32)
    groups = tl.full([], 0, tl.int32)
    rows = tl.full([], 0, tl.int32)
    shared = tl.full([], 0, tl.int64)
    saved = tl.full([], 0, tl.int64)
    stock = tl.full([], 0, tl.int64)
    for base in range(0, num_rows, CHUNK_R):
        other = base + tl.arange(0, CHUNK_R)
        ok = other < num_rows
        theirs, _ = member(
            leader_ptr + here, common_ptr + here, best_ptr + here, other, ok, min_saved
        )
        grouped = theirs >= 0
        queries = tl.load(starts_ptr + other + 1, mask=grouped, other=0)
        queries -= tl.load(starts_ptr + other, mask=grouped, other=0)
        same = grouped & (theirs == leader)
        ahead = grouped & (_place(theirs, dense) < _place(leader, dense))
        begin += tl.sum(tl.where(ahead, queries, 0))
        members += tl.sum(tl.where(same, queries, 0))
        before += tl.sum(tl.where(ahead | (same & (other < row)), queries, 0))
        total += tl.sum(queries)
        rows += tl.sum(grouped.to(tl.int32))
        # Here `other` is a leader, which need not be a member of its group.
        best = tl.load(best_ptr + here + other, mask=ok, other=0)
        kept = (best > 0) & (best >> 32 >= min_saved)
        rank += tl.sum((kept & (_place(other, dense) < _place(leader, dense))).to(tl.int32))
        groups += tl.sum(kept.to(tl.int32))
        if row == 0:
            behind = tl.zeros([CHUNK_R], tl.int32)
            if level > 0:
                above = here - row_stride
                _, behind = member(
                    leader_ptr + above, common_ptr + above, best_ptr + above, other, ok, min_saved
                )
            length = (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32) - behind
            shared += tl.sum(tl.where(kept, length, 0).to(tl.int64))
            saved += tl.sum(tl.where(kept, best >> 32, 0))
            stock += tl.sum(tl.load(seq_lens_ptr + other, mask=ok, other=0).to(tl.int64))

    lane = tl.arange(0, CHUNK_C)
    first = tl.load(starts_ptr + row)
    queries = tl.load(starts_ptr + row + 1) - first
    blocks_ptr = table_ptr + row.to(tl.int64) * table_stride
    if leader >= 0:
        for base in range(0, queries, CHUNK_C):
            at = index_ptr + level * token_stride + first + base + lane
            tl.store(at, before + base + lane, mask=base + lane < queries)
            if DENSE and leader == dense:
                at = index_ptr + LEVELS * token_stride + first + base + lane
                tl.store(at, before + base + lane, mask=base + lane < queries)
        if before == begin:
            # The first member writes for its group: any member's blocks are the group's.
            group = level * group_stride + rank
            tl.store(cu_tokens_ptr + level * cu_stride + rank, begin)
            length = (depth - start) * BLOCK_SIZE
            if DENSE and leader == dense:
                # A sequence without queries stands for all keys before the segment's.
                key = tl.load(blocks_ptr) * BLOCK_SIZE
                for i in tl.static_range(4):
                    tl.store(dense_ptr + i, tl.where(i == 2, members, 0))
                tl.store(dense_ptr + 4, key)
                tl.store(dense_ptr + 5, key + length)
                length = tl.full([], 0, tl.int32)
            tl.store(segment_lens_ptr + group, length)
            segment_ptr = segment_table_ptr + group.to(tl.int64) * segment_stride - start
            for base in range(start, depth, CHUNK_C):
                ok = base + lane < depth
                block = tl.load(blocks_ptr + base + lane, mask=ok, other=0)
                tl.store(segment_ptr + base + lane, block, mask=ok)
    # Groups that this step has not are sequences without queries and without keys.
    if (row >= groups) & (row <= num_groups):
        tl.store(cu_tokens_ptr + level * cu_stride + row, total)
        if row < num_groups:
            tl.store(segment_lens_ptr + level * group_stride + row, 0)

    if DENSE and (row == 0) & (level == 0) & (dense < 0):
        for i in tl.static_range(6):
            tl.store(dense_ptr + i, tl.full([], 0, tl.int32))

    if level == 0:
        covered = tl.full([], 0, tl.int32)
        for i in tl.static_range(LEVELS):
            at = i * row_stride
            _, end = member(
                leader_ptr + at, common_ptr + at, best_ptr + at, row, row >= 0, min_saved
            )
            covered = tl.maximum(covered, end)
        length = tl.load(seq_lens_ptr + row)
        tl.store(context_lens_ptr + row, length - covered * BLOCK_SIZE)
        needed = tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, num_columns)
        context_ptr = context_table_ptr + row.to(tl.int64) * context_stride - covered
        for base in range(covered, needed, CHUNK_C):
            ok = base + lane < needed
            block = tl.load(blocks_ptr + base + lane, mask=ok, other=0)
            tl.store(context_ptr + base + lane, block, mask=ok)

    if row == 0:
        outer = level == 0
        _report(report_ptr, 0, groups.to(tl.int64), count, STATS)
        _report(report_ptr, 1, tl.where(outer, rows, 0).to(tl.int64), count, STATS)
        _report(report_ptr, 2, shared * BLOCK_SIZE, count, STATS)
        _report(report_ptr, 3, saved * BLOCK_SIZE, count, STATS)
        _report(report_ptr, 4, tl.where(outer, stock, 0), count, STATS)
        steps = tl.where(outer, count, 0).to(tl.int64)
        tl.atomic_add(report_ptr + STATS, steps)
        tl.atomic_add(report_ptr + STATS + 1, tl.where(groups > 0, steps, 0))
