"""The plan of a step made on the GPU: its buffers, and the kernel launches that fill them.

One program per row and launch; nothing comes back to the host. `DevicePlan` owns the buffers.
Who groups with whom, per level:

1. *hash_prefixes*: each row hashes its first 1, 2, 3, 4, 6, 8, 12, 16, ... blocks.
2. *match_leaders*: n rows with one hash at one of these depths would save (n - 1) / n * depth reads
   each. A row takes the depth where that is most; the first row with that hash is its leader.
   Hashes only propose: the blocks in common with the leader are then counted one by one.
3. *score_groups*: the rows of one leader form one group. Of the depths that its rows have in common
   with it, the group takes the one that saves most reads, (members - 1) * depth.
4. *keep_groups*, where a level may have more groups than there is room for: those that save most.
5. *lay_out*: rows that reach that depth are the members; places, segments and contexts are written.

The reference is the plain definition in the tests; the host's policy is `sharing.policy`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_relay.ops.planning.group_kernels import (
    checkpoints,
    hash_prefixes_kernel,
    keep_groups_kernel,
    match_leaders_kernel,
    score_groups_kernel,
)
from vllm_relay.ops.planning.layout_kernel import lay_out_kernel

# Rows that a program holds at once: the least that are all, or the most. Each is compiled; the last
# serves more rows than graphs have by default, so that no step waits for the compiler.
CHUNKS_OF_ROWS = (32, 256, 1024)
CHUNK_COLUMNS = 256
# Groups of a level. Every system call walks all sequences of its level, empty ones, too:
# FlashAttention 3's scheduler 31 at a time, and each program of its combine step once more.
MAX_GROUPS = 64
# Numbers of a step in `PlanBuffers.report`: groups, requests, tokens_shared, tokens_saved,
# tokens_stock as in `SharingStats`.
STATS = 5


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanBuffers:
    """Everything the kernels write, for at most R rows, T tokens, M columns, G groups, L levels.

    Attributes:
        depth: int32 [R], full computed blocks.
        hashes: int64 [checkpoints, R], hash of a row's first blocks; 0: it has fewer.
        leader: int32 [L, R]; -1: none. common: int32 [L, R], blocks in common with the leader.
        score: int64 [L, R], the group that a row leads, see `score.pack_score`.
        consecutive: int32 [R], leading blocks with consecutive ids.
        cu_tokens: int32 [L, G + 1], first query token of each group in the order of its level.
        segment_lens: int32 [L, G], tokens. segment_table: int32 [L, G, M], blocks.
        index: int32 [L (+ 1 with dense), T], see `Plan.index`.
        dense: int32 [2, 3], query_start_loc and key_start_loc of `DensePart`.
        context_table: int32 [R, M]. context_lens: int32 [R], tokens behind a row's segments; 1 for
            padding.
        report: int64 [STATS + 2 + STATS]: numbers of the step; counted steps, those with groups,
            and sums of the numbers over counted steps.
    """

    depth: Tensor
    hashes: Tensor
    leader: Tensor
    common: Tensor
    score: Tensor
    consecutive: Tensor
    cu_tokens: Tensor
    segment_lens: Tensor
    segment_table: Tensor
    index: Tensor
    dense: Tensor
    context_table: Tensor
    context_lens: Tensor
    report: Tensor

    @classmethod
    def allocate(
        cls,
        *,
        rows: int,
        tokens: int,
        columns: int,
        groups: int,
        levels: int,
        dense: bool,
        device: torch.device,
    ) -> "PlanBuffers":
        """All zeros: block 0 exists, so an entry that is never written is a valid block."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            depth=zeros(rows),
            hashes=zeros(checkpoints(columns), rows, dtype=torch.int64),
            leader=zeros(levels, rows),
            common=zeros(levels, rows),
            score=zeros(levels, rows, dtype=torch.int64),
            consecutive=zeros(rows),
            cu_tokens=zeros(levels, groups + 1),
            segment_lens=zeros(levels, groups),
            segment_table=zeros(levels, groups, columns),
            index=zeros(levels + dense, tokens),
            dense=zeros(2, 3),
            context_table=zeros(rows, columns),
            context_lens=zeros(rows),
            report=zeros(2 * STATS + 2, dtype=torch.int64),
        )


def plan_step(
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    buffers: PlanBuffers,
    *,
    num_tokens: int,
    num_groups: int,
    block_size: int,
    window: int,
    min_saved_blocks: int,
    counted: bool,
) -> None:
    """Fill the buffers for one step; arguments as `DevicePlan.update`, checked there."""
    b = buffers
    num_rows, num_columns = block_table.shape
    levels, max_rows = b.leader.shape
    _, max_groups, max_columns = b.segment_table.shape
    dense, max_tokens = b.index.shape[0] - levels, b.index.shape[1]
    table_stride = block_table.stride(0)
    # The buffers may be wider than this table.
    depths = checkpoints(num_columns)
    # A group that saves nothing is none.
    min_saved = max(1, min_saved_blocks)
    rows_at_once = next((n for n in CHUNKS_OF_ROWS if n >= num_rows), CHUNKS_OF_ROWS[-1])
    hash_prefixes: Any = hash_prefixes_kernel
    hash_prefixes[(num_rows,)](
        block_table, seq_lens, query_start_loc,
        b.depth, b.hashes, b.score, b.consecutive, b.index, b.report,
        table_stride, max_rows, max_tokens, num_rows, num_columns, num_tokens,
        BLOCK_SIZE=block_size, WINDOW=window, LEVELS=levels, DENSE=dense, CHECKPOINTS=depths,
        STATS=STATS, CHUNK_C=CHUNK_COLUMNS,
    )  # fmt: skip
    match_leaders: Any = match_leaders_kernel
    score_groups: Any = score_groups_kernel
    keep_groups: Any = keep_groups_kernel
    for level in range(levels):
        match_leaders[(num_rows,)](
            block_table, b.depth, b.hashes, b.leader, b.common, b.score,
            table_stride, max_rows, num_rows, min_saved,
            LEVEL=level, CHECKPOINTS=depths, CHUNK_R=rows_at_once, CHUNK_C=CHUNK_COLUMNS,
        )  # fmt: skip
        score_groups[(num_rows,)](
            b.leader, b.common, b.score, max_rows, num_rows, min_saved,
            LEVEL=level, CHUNK_R=rows_at_once,
        )  # fmt: skip
        if num_rows // 2 > MAX_GROUPS:
            keep_groups[(1,)](
                b.score, max_rows, num_rows, num_groups, min_saved,
                LEVEL=level, CHUNK_R=rows_at_once,
            )  # fmt: skip
    lay_out: Any = lay_out_kernel
    lay_out[(num_rows + 1, levels)](
        block_table, seq_lens, query_start_loc,
        b.leader, b.common, b.score, b.consecutive, b.cu_tokens, b.segment_lens, b.segment_table,
        b.index, b.dense, b.context_table, b.context_lens, b.report,
        table_stride, max_rows, max_tokens, max_groups, max_columns,
        num_rows, num_columns, num_groups, min_saved, int(counted),
        BLOCK_SIZE=block_size, LEVELS=levels, DENSE=dense, STATS=STATS,
        CHUNK_R=rows_at_once, CHUNK_C=CHUNK_COLUMNS,
    )  # fmt: skip
