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

How close this comes to the best choice, which `sharing.find_forest` makes, in random batches of
tenants and documents is held by a test in tests/triton/interpreted/test_plan.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from vllm_relay.ops.planning.group_kernels import (
    checkpoints,
    match_kernel,
    score_kernel,
    sign_kernel,
)
from vllm_relay.ops.planning.layout_kernel import settle_kernel

# Most rows, and columns, that a program holds at once.
CHUNK_ROWS = 1024
CHUNK_COLUMNS = 256
# Numbers of a step in `PlanBuffers.report`: groups, rows in groups, tokens of segments, tokens not
# read again, tokens of all rows. After them: steps, steps with groups, and totals of the five.
STATS = 5


@dataclass(frozen=True, eq=False)
class PlanBuffers:
    """What the kernels write, on one device, for at most R rows, T tokens, M columns, G groups.

    Attributes:
        depth: int32 [R], full computed blocks.
        hashes: int64 [checkpoints, R]; 0: the row is not so long.
        leader, common: int32 [levels, R]; -1 for no leader; blocks in common with it.
        best: int64 [levels, R], the group that a row leads, packed as in `score_kernel`.
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
    sign: Any = sign_kernel
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
    match: Any = match_kernel
    score: Any = score_kernel
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
    settle: Any = settle_kernel
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
