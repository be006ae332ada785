"""Layout kernel of the plan on the GPU: the arrays that attention calls read; see `launch`."""

import triton
import triton.language as tl

from vllm_relay.ops.planning.score import (
    STEP_VALUES,
    dense_leader,
    end_of_segment,
    group_of,
    pays,
    saved_reads,
)


@triton.jit
def _copy_blocks(from_ptr, to_ptr, begin, end, CHUNK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """to[i - begin] = from[i] for columns i in [begin, end)."""
    for base in range(begin, end, CHUNK_C):
        column = base + tl.arange(0, CHUNK_C)
        block = tl.load(from_ptr + column, mask=column < end, other=0)
        tl.store(to_ptr + (column - begin), block, mask=column < end)


@triton.jit
def _store_places(index_ptr, place, queries, CHUNK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """index[i] = place + i for i in [0, queries)."""
    for base in range(0, queries, CHUNK_C):
        token = base + tl.arange(0, CHUNK_C)
        tl.store(index_ptr + token, place + token, mask=token < queries)


@triton.jit
def _add(report_ptr, item, value, counted, STATS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to a number of this step and, if the step counts, to its total over all steps."""
    tl.atomic_add(report_ptr + item, value)
    tl.atomic_add(report_ptr + STATS + 2 + item, value * counted)


@triton.jit
def _rank(leader, dense):  # type: ignore[no-untyped-def]
    """Sort key of groups: the leader's row; the dense group comes first."""
    return tl.where(leader == dense, -1, leader)


@triton.jit
def _place_of(  # type: ignore[no-untyped-def]
    row,
    leader,  # of the row's group
    dense,
    starts_ptr,  # int32 [num_rows + 1]
    leader_ptr,  # int32 [LEVELS, max_rows]
    common_ptr,  # int32 [LEVELS, max_rows]
    score_ptr,  # int64 [LEVELS, max_rows]
    offset,  # of the level
    num_rows,
    min_saved,
    CHUNK_R: tl.constexpr,
):
    """Place of a grouped row in the order of its level: by group, then by row.

    Returns query tokens ahead of the row, query tokens ahead of its group, query tokens of its
    group, groups ahead of its group.
    """
    place = tl.full([], 0, tl.int32)
    begin = tl.full([], 0, tl.int32)
    tokens = tl.full([], 0, tl.int32)
    group = tl.full([], 0, tl.int32)
    for base in range(0, num_rows, CHUNK_R):
        other = base + tl.arange(0, CHUNK_R)
        ok = other < num_rows
        theirs, _ = group_of(leader_ptr, common_ptr, score_ptr, offset, other, ok, min_saved)
        grouped = theirs >= 0
        queries = tl.load(starts_ptr + other + 1, mask=grouped, other=0)
        queries -= tl.load(starts_ptr + other, mask=grouped, other=0)
        ahead = grouped & (_rank(theirs, dense) < _rank(leader, dense))
        same = grouped & (theirs == leader)
        place += tl.sum(tl.where(ahead | (same & (other < row)), queries, 0))
        begin += tl.sum(tl.where(ahead, queries, 0))
        tokens += tl.sum(tl.where(same, queries, 0))
        # Groups are counted at their leaders, which need not be members.
        leads = pays(tl.load(score_ptr + offset + other, mask=ok, other=0), min_saved)
        group += tl.sum((leads & (_rank(other, dense) < _rank(leader, dense))).to(tl.int32))
    return place, begin, tokens, group


@triton.jit
def _close_level(  # type: ignore[no-untyped-def]
    level,
    seq_lens_ptr,  # int32 [num_rows]
    starts_ptr,  # int32 [num_rows + 1]
    leader_ptr,  # int32 [LEVELS, max_rows]
    common_ptr,  # int32 [LEVELS, max_rows]
    score_ptr,  # int64 [LEVELS, max_rows]
    cu_tokens_ptr,  # int32 [LEVELS, max_groups + 1], out behind the groups
    segment_lens_ptr,  # int32 [LEVELS, max_groups], out behind the groups
    report_ptr,  # int64 [STATS + 2 + STATS], added to
    max_rows,
    max_groups,
    num_rows,
    num_groups,
    min_saved,
    counted,
    BLOCK_SIZE: tl.constexpr,
    STATS: tl.constexpr,
    CHUNK_R: tl.constexpr,
):
    """Numbers of a level, and empty sequences in place of the groups that the step lacks."""
    offset = level * max_rows
    groups = tl.full([], 0, tl.int32)
    requests = tl.full([], 0, tl.int32)
    tokens = tl.full([], 0, tl.int32)
    shared = tl.full([], 0, tl.int64)
    saved = tl.full([], 0, tl.int64)
    stock = tl.full([], 0, tl.int64)
    for base in range(0, num_rows, CHUNK_R):
        row = base + tl.arange(0, CHUNK_R)
        ok = row < num_rows
        leader, _ = group_of(leader_ptr, common_ptr, score_ptr, offset, row, ok, min_saved)
        grouped = leader >= 0
        requests += tl.sum(grouped.to(tl.int32))
        tokens += tl.sum(tl.load(starts_ptr + row + 1, mask=grouped, other=0))
        tokens -= tl.sum(tl.load(starts_ptr + row, mask=grouped, other=0))
        stock += tl.sum(tl.load(seq_lens_ptr + row, mask=ok, other=0).to(tl.int64))
        score = tl.load(score_ptr + offset + row, mask=ok, other=0)
        leads = pays(score, min_saved)
        # A segment begins where that of the group above ends; nothing is above level 0.
        above = row < tl.where(level > 0, num_rows, 0)
        _, start = group_of(
            leader_ptr, common_ptr, score_ptr, offset - max_rows, row, above, min_saved
        )
        groups += tl.sum(leads.to(tl.int32))
        shared += tl.sum(tl.where(leads, end_of_segment(score) - start, 0).to(tl.int64))
        saved += tl.sum(tl.where(leads, saved_reads(score), 0))

    for base in range(groups, num_groups + 1, CHUNK_R):
        group = base + tl.arange(0, CHUNK_R)
        at = cu_tokens_ptr + level * (max_groups + 1) + group
        tl.store(at, tl.zeros([CHUNK_R], tl.int32) + tokens, mask=group <= num_groups)
        at = segment_lens_ptr + level * max_groups + group
        tl.store(at, tl.zeros([CHUNK_R], tl.int32), mask=group < num_groups)

    outer = level == 0
    _add(report_ptr, 0, groups.to(tl.int64), counted, STATS)
    _add(report_ptr, 1, tl.where(outer, requests, 0).to(tl.int64), counted, STATS)
    _add(report_ptr, 2, shared * BLOCK_SIZE, counted, STATS)
    _add(report_ptr, 3, saved * BLOCK_SIZE, counted, STATS)
    _add(report_ptr, 4, tl.where(outer, stock, 0), counted, STATS)
    steps = tl.where(outer, counted, 0).to(tl.int64)
    tl.atomic_add(report_ptr + STATS, steps)
    tl.atomic_add(report_ptr + STATS + 1, tl.where(groups > 0, steps, 0))


@triton.jit(do_not_specialize=STEP_VALUES)
def lay_out_kernel(  # type: ignore[no-untyped-def]
    table_ptr,  # int32 [num_rows, num_columns]
    seq_lens_ptr,  # int32 [num_rows]
    starts_ptr,  # int32 [num_rows + 1], query_start_loc
    leader_ptr,  # int32 [LEVELS, max_rows]
    common_ptr,  # int32 [LEVELS, max_rows]
    score_ptr,  # int64 [LEVELS, max_rows]
    consecutive_ptr,  # int32 [max_rows]
    cu_tokens_ptr,  # int32 [LEVELS, max_groups + 1], out
    segment_lens_ptr,  # int32 [LEVELS, max_groups], out
    segment_table_ptr,  # int32 [LEVELS, max_groups, max_columns], out
    index_ptr,  # int32 [LEVELS + DENSE, max_tokens], out
    dense_ptr,  # int32 [2, 3], out where DENSE
    context_table_ptr,  # int32 [max_rows, max_columns], out
    context_lens_ptr,  # int32 [max_rows], out
    report_ptr,  # int64 [STATS + 2 + STATS], added to
    table_stride,
    max_rows,
    max_tokens,
    max_groups,
    max_columns,
    num_rows,
    num_columns,
    num_groups,
    min_saved,
    counted,
    BLOCK_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    DENSE: tl.constexpr,
    STATS: tl.constexpr,
    CHUNK_R: tl.constexpr,
    CHUNK_C: tl.constexpr,
):
    """Places of query tokens, segments and contexts; a program per (row, level) and per level."""
    row = tl.program_id(0)
    level = tl.program_id(1)
    offset = level * max_rows
    # No leader is -2: level 1 and on have no dense group.
    dense = tl.full([], -2, tl.int32)
    if DENSE and level == 0:
        dense = dense_leader(score_ptr, consecutive_ptr, num_rows, min_saved, CHUNK_R)
        if (row == num_rows) & (dense < 0):
            for i in tl.static_range(6):
                tl.store(dense_ptr + i, tl.full([], 0, tl.int32))

    if row == num_rows:
        _close_level(
            level, seq_lens_ptr, starts_ptr, leader_ptr, common_ptr, score_ptr, cu_tokens_ptr,
            segment_lens_ptr, report_ptr, max_rows, max_groups, num_rows, num_groups, min_saved,
            counted, BLOCK_SIZE, STATS, CHUNK_R,
        )  # fmt: skip
    else:
        blocks_ptr = table_ptr + row.to(tl.int64) * table_stride
        leader, end = group_of(leader_ptr, common_ptr, score_ptr, offset, row, row >= 0, min_saved)
        if leader >= 0:
            place, begin, tokens, group = _place_of(
                row, leader, dense, starts_ptr, leader_ptr, common_ptr, score_ptr, offset,
                num_rows, min_saved, CHUNK_R,
            )  # fmt: skip
            first = tl.load(starts_ptr + row)
            queries = tl.load(starts_ptr + row + 1) - first
            line = tl.where(leader == dense, LEVELS, level)
            _store_places(index_ptr + line * max_tokens + first, place, queries, CHUNK_C)
            if place == begin:
                # The first member writes for its group: any member's blocks are the group's.
                _, start = group_of(
                    leader_ptr, common_ptr, score_ptr, offset - max_rows, row, level > 0, min_saved
                )
                length = (end - start) * BLOCK_SIZE
                if DENSE and leader == dense:
                    # [0, 0, tokens] and [0, first key, last key + 1], see `plan.DensePart`.
                    key = tl.load(blocks_ptr) * BLOCK_SIZE
                    for i in tl.static_range(4):
                        tl.store(dense_ptr + i, tl.where(i == 2, tokens, 0))
                    tl.store(dense_ptr + 4, key)
                    tl.store(dense_ptr + 5, key + length)
                    # In its level it has no query and no key: kernels may hang on queries without.
                    length = tl.full([], 0, tl.int32)
                    begin = tokens
                tl.store(cu_tokens_ptr + level * (max_groups + 1) + group, begin)
                group += level * max_groups
                tl.store(segment_lens_ptr + group, length)
                segment_ptr = segment_table_ptr + group.to(tl.int64) * max_columns
                _copy_blocks(blocks_ptr, segment_ptr, start, end, CHUNK_C)

        if level == 0:
            covered = tl.full([], 0, tl.int32)
            for i in tl.static_range(LEVELS):
                _, end = group_of(
                    leader_ptr, common_ptr, score_ptr, i * max_rows, row, row >= 0, min_saved
                )
                covered = tl.maximum(covered, end)
            # One key for a row of padding, of block 0: FlashAttention 2 writes the LSE of a row
            # without keys over that of others (Dao-AILab/flash-attention#2842).
            length = tl.maximum(tl.load(seq_lens_ptr + row), 1)
            tl.store(context_lens_ptr + row, length - covered * BLOCK_SIZE)
            needed = tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, num_columns)
            context_ptr = context_table_ptr + row.to(tl.int64) * max_columns
            _copy_blocks(blocks_ptr, context_ptr, covered, needed, CHUNK_C)
