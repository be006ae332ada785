"""The plan of a step made on the GPU: who shares which blocks, as the arrays that kernels read.

Four launches of one program per row, and nothing comes back to the host. `DevicePlan` owns the
buffers; see there for what they hold. Exercised under Triton's interpreter and compiled for sm_80
and sm_90; not yet run on a GPU.

Who groups with whom, per level:

1. *sign*: each row hashes its first 1, 2, 3, 4, 6, 8, 12, 16, ... blocks.
2. *match*: n rows with the same hash at one of these depths would save (n - 1) / n * depth reads
   each. A row takes the depth where that is most, and there the first row: its leader. Hashes only
   propose: the blocks in common with the leader are then counted block by block.
3. *score*: the rows of one leader form one group; of all depths that its rows have in common with
   it, the one that saves most reads, (members - 1) * depth, is the depth of the group.
4. *settle*: rows that reach that depth are its members. They are laid out.

Against the best choice, which `sharing.find_forest` makes, this saves 97 % of the reads in random
batches of tenants and documents (tests/ops/interpreted_plan.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Most rows, and columns, that a program holds at once.
CHUNK_ROWS = 1024
CHUNK_COLUMNS = 256
# Numbers of a step in `PlanBuffers.report`: groups, rows in groups, tokens of segments, tokens not
# read again, tokens of all rows. After them: steps, steps with groups, and totals of the five.
STATS = 5

# These change with every step: no kernel is compiled anew for a value of them.
_HOST_NUMBERS = ["num_rows", "num_columns", "num_tokens", "min_saved", "num_groups", "count"]


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
def _member(leader_ptr, common_ptr, best_ptr, row, ok, min_saved):  # type: ignore[no-untyped-def]
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


@triton.jit(do_not_specialize=_HOST_NUMBERS)
def _sign_kernel(  # type: ignore[no-untyped-def]
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


@triton.jit(do_not_specialize=_HOST_NUMBERS)
def _match_kernel(  # type: ignore[no-untyped-def]
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
        owner, start = _member(
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
                    theirs, _ = _member(
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


@triton.jit(do_not_specialize=_HOST_NUMBERS)
def _score_kernel(  # type: ignore[no-untyped-def]
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
            _, start = _member(
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


@triton.jit(do_not_specialize=_HOST_NUMBERS)
def _settle_kernel(  # type: ignore[no-untyped-def]
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
    leader, depth = _member(
        leader_ptr + here, common_ptr + here, best_ptr + here, row, row >= 0, min_saved
    )
    start = tl.full([], 0, tl.int32)
    if level > 0:
        above = here - row_stride
        _, start = _member(
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
        theirs, _ = _member(
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
                _, behind = _member(
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
            _, end = _member(
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


@triton.jit
def _report(report_ptr, item, value, count, STATS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to a number of this step and, where counted, to its total over all steps."""
    tl.atomic_add(report_ptr + item, value)
    tl.atomic_add(report_ptr + STATS + 2 + item, value * count)


@dataclass(frozen=True, eq=False)
class PlanBuffers:
    """What the kernels write, on one device, for at most R rows, T tokens, M columns, G groups.

    Attributes:
        depth: int32 [R], full computed blocks.
        hashes: int64 [checkpoints, R]; 0: the row is not so long.
        leader, common: int32 [levels, R]; -1 for no leader; blocks in common with it.
        best: int64 [levels, R], the group that a row leads, packed as in `_score_kernel`.
        cu_tokens: int32 [levels, G + 1], where each group begins in the order of its level.
        segment_lens: int32 [levels, G], tokens. segment_table: int32 [levels, G, M].
        run: int32 [R], leading blocks that follow one another in memory.
        index: int32 [levels (+ 1 for dense), T], a token's place in the order of the level, the
            last for level 0 once more; -1: in no group, or not in the dense one.
        dense: int32 [2, 3], as in `DensePart`.
        context_table: int32 [R, M], context_lens: int32 [R]: what is behind a row's segments.
        report: int64 [2 * STATS + 2], see `STATS`.
    """

    depth: Tensor
    hashes: Tensor
    leader: Tensor
    common: Tensor
    best: Tensor
    cu_tokens: Tensor
    segment_lens: Tensor
    segment_table: Tensor
    run: Tensor
    index: Tensor
    dense: Tensor
    context_table: Tensor
    context_lens: Tensor
    report: Tensor

    @classmethod
    def make(
        cls,
        rows: int,
        tokens: int,
        columns: int,
        groups: int,
        levels: int,
        dense: bool,
        device: torch.device,
    ) -> "PlanBuffers":
        """All zeros: block 0 exists, so that what is never written is never out of bounds."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            depth=zeros(rows),
            hashes=zeros(checkpoints(columns), rows, dtype=torch.int64),
            leader=zeros(levels, rows),
            common=zeros(levels, rows),
            best=zeros(levels, rows, dtype=torch.int64),
            cu_tokens=zeros(levels, groups + 1),
            segment_lens=zeros(levels, groups),
            segment_table=zeros(levels, groups, columns),
            run=zeros(rows),
            index=zeros(levels + dense, tokens),
            dense=zeros(2, 3),
            context_table=zeros(rows, columns),
            context_lens=zeros(rows),
            report=zeros(2 * STATS + 2, dtype=torch.int64),
        )


def make_plan(
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    buffers: PlanBuffers,
    *,
    num_tokens: int,
    num_groups: int,
    block_size: int,
    min_saved_blocks: int,
    count: bool,
) -> None:
    """Plan one step into ``buffers``; arguments as `DevicePlan.update`, checked there."""
    b = buffers
    rows, columns = block_table.shape
    levels = b.leader.shape[0]
    dense = b.index.shape[0] - levels
    # The buffers may be wider than this table.
    depths = checkpoints(columns)
    # A group saves something, or it is none.
    least = max(1, min_saved_blocks)
    row_stride = b.depth.shape[0]
    chunk: dict[str, Any] = {
        "CHUNK_R": min(CHUNK_ROWS, triton.next_power_of_2(rows)),
        "CHUNK_C": CHUNK_COLUMNS,
    }
    sign: Any = _sign_kernel
    sign[(rows,)](
        block_table,
        seq_lens,
        query_start_loc,
        b.depth,
        b.hashes,
        b.best,
        b.run,
        b.index,
        b.report,
        block_table.stride(0),
        row_stride,
        b.index.stride(0),
        rows,
        columns,
        num_tokens,
        BLOCK_SIZE=block_size,
        LEVELS=levels,
        DENSE=dense,
        CHECKPOINTS=depths,
        STATS=STATS,
        CHUNK_C=CHUNK_COLUMNS,
    )
    match: Any = _match_kernel
    score: Any = _score_kernel
    for level in range(levels):
        match[(rows,)](
            block_table,
            b.depth,
            b.hashes,
            b.leader,
            b.common,
            b.best,
            block_table.stride(0),
            row_stride,
            rows,
            least,
            LEVEL=level,
            CHECKPOINTS=depths,
            **chunk,
        )
        score[(rows,)](
            b.leader,
            b.common,
            b.best,
            row_stride,
            rows,
            least,
            LEVEL=level,
            CHUNK_R=chunk["CHUNK_R"],
        )
    settle: Any = _settle_kernel
    settle[(rows, levels)](
        block_table,
        seq_lens,
        query_start_loc,
        b.leader,
        b.common,
        b.best,
        b.run,
        b.cu_tokens,
        b.segment_lens,
        b.segment_table,
        b.index,
        b.dense,
        b.context_table,
        b.context_lens,
        b.report,
        block_table.stride(0),
        row_stride,
        b.index.stride(0),
        b.cu_tokens.stride(0),
        b.segment_lens.stride(0),
        b.segment_table.stride(1),
        b.context_table.stride(0),
        rows,
        columns,
        num_groups,
        least,
        int(count),
        BLOCK_SIZE=block_size,
        LEVELS=levels,
        DENSE=dense,
        STATS=STATS,
        **chunk,
    )
