"""Scores of groups and membership in them: device functions that the plan's kernels share."""

import triton
import triton.language as tl

# Values that change from step to step: no kernel is compiled anew for one of them.
STEP_VALUES = ["num_rows", "num_columns", "num_tokens", "num_groups", "min_saved", "counted"]


@triton.jit
def pack_score(saved, depth):  # type: ignore[no-untyped-def]
    """Score of a group: saved block reads << 32 | 2**31 - 1 - depth.

    The larger score saves more. Of equal savings the smaller depth wins: it has more members.
    """
    return (saved << 32) | (0x7FFFFFFF - depth).to(tl.int64)


@triton.jit
def saved_reads(score):  # type: ignore[no-untyped-def]
    """Block reads that a group of this score saves."""
    return score >> 32


@triton.jit
def end_of_segment(score):  # type: ignore[no-untyped-def]
    """Depth of a group of this score: the column behind its segment."""
    return (0x7FFFFFFF - (score & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def pays(score, min_saved):  # type: ignore[no-untyped-def]
    """True where the rows of a leader form a group."""
    return (score > 0) & (saved_reads(score) >= min_saved)


@triton.jit
def group_of(  # type: ignore[no-untyped-def]
    leader_ptr,  # [LEVELS, max_rows]
    common_ptr,  # [LEVELS, max_rows]
    score_ptr,  # [LEVELS, max_rows]
    offset,  # of a level: level * max_rows
    row,  # scalar or vector
    ok,  # as row
    min_saved,
):
    """Leader of a row's group and the end of the group's segment; (-1, 0): in no group."""
    leader = tl.load(leader_ptr + offset + row, mask=ok, other=-1)
    led = ok & (leader >= 0)
    common = tl.load(common_ptr + offset + row, mask=led, other=0)
    score = tl.load(score_ptr + offset + tl.maximum(leader, 0), mask=led, other=0)
    end = end_of_segment(score)
    member = led & pays(score, min_saved) & (common >= end)
    return tl.where(member, leader, -1), tl.where(member, end, 0)


@triton.jit
def dense_leader(  # type: ignore[no-untyped-def]
    score_ptr,  # int64 [max_rows], of level 0
    consecutive_ptr,  # int32 [max_rows]
    num_rows,
    min_saved,
    CHUNK_R: tl.constexpr,
):
    """Leader of the group that saves most of those whose blocks are consecutive; -2: none."""
    most = tl.full([], 0, tl.int64)
    found = tl.full([], -2, tl.int32)
    for base in range(0, num_rows, CHUNK_R):
        leader = base + tl.arange(0, CHUNK_R)
        ok = leader < num_rows
        score = tl.load(score_ptr + leader, mask=ok, other=0)
        run = tl.load(consecutive_ptr + leader, mask=ok, other=0)
        dense = pays(score, min_saved) & (run >= end_of_segment(score))
        score = tl.where(dense, score, 0)
        top = tl.max(score)
        if top > most:
            most = top
            found = tl.min(tl.where(dense & (score == top), leader, num_rows))
    return found
