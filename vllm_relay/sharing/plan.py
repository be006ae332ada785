"""Forest -> RelayPlan: the flat arrays that kernels read, made once per step for every layer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_relay.sharing._checks import check_batch
from vllm_relay.sharing.forest import Forest, Int32Array, Level


@dataclass(frozen=True, eq=False)
class LevelPlan:
    """System attention of one level, in the shape of a variable-length attention over G sequences.

    Each level covers all N entries of ``RelayPlan.rows``. Where a deeper level leaves rows out, a
    sequence of 0 tokens fills the gap: its partial has LSE -inf and contributes nothing. Level 0
    has none of these.

    Attributes:
        cu_rows: int32 [G + 1], offsets into ``RelayPlan.rows``, from 0 to N.
        block_table: int32 [G, most blocks of a segment], zero padded.
        seq_lens: int32 [G], tokens of each segment; a multiple of the block size.
        groups: int32 [G], which group of the forest's level each sequence is; -1 for none.
    """

    cu_rows: Int32Array
    block_table: Int32Array
    seq_lens: Int32Array
    groups: Int32Array


@dataclass(frozen=True, eq=False)
class RelayPlan:
    """What one step reads: each level's segments once, then every row's context.

    Attributes:
        rows: int32 [N], the rows in groups, ordered so that each group of each level is contiguous.
        levels: outermost first; segments of level 0 start each row's sequence.
        context_block_table: int32 [R, M'], for all rows in their own order: the table without the
            blocks of the row's segments, zero padded. M' is what the longest context needs.
        context_lens: int32 [R], tokens after the row's segments, this step's query tokens included.
    """

    rows: Int32Array
    levels: tuple[LevelPlan, ...]
    context_block_table: Int32Array
    context_lens: Int32Array

    @property
    def num_groups(self) -> int:
        return sum(int(np.count_nonzero(level.seq_lens)) for level in self.levels)

    @property
    def tokens_shared(self) -> int:
        """KV tokens of all segments, each counted once."""
        return sum(int(level.seq_lens.sum()) for level in self.levels)

    @property
    def tokens_relay(self) -> int:
        """KV tokens that a layer reads with this plan."""
        return self.tokens_shared + int(self.context_lens.sum())

    @property
    def tokens_stock(self) -> int:
        """KV tokens that a layer reads without it: every row its whole sequence."""
        attended = sum(int(level.seq_lens @ np.diff(level.cu_rows)) for level in self.levels)
        return attended + int(self.context_lens.sum())


def make_plan(forest: Forest, block_table: Int32Array, seq_lens: Int32Array) -> RelayPlan | None:
    """Lay a forest out as arrays.

    Args:
        forest: valid for these rows (`Forest.validate`); usually what `select` returned.
        block_table: int32 [R, M], the one the forest was found in.
        seq_lens: int32 [R], length of each row with this step's query tokens; 0 for padding.

    Returns:
        The plan, in arrays of its own, or None when the forest is empty.

    Raises:
        ValueError: a wrong shape or dtype, a forest of another batch, a length below 0, beyond the
            block table, or that leaves a row no token after its segments.
    """
    check_batch(block_table, seq_lens, forest.block_size, lens_name="seq_lens")
    if forest.num_rows != len(block_table):
        raise ValueError(f"forest has {forest.num_rows} rows, block_table {len(block_table)}")
    if not forest.levels:
        return None
    blocks_needed = -(-seq_lens // forest.block_size)
    if blocks_needed.max() > block_table.shape[1]:
        capacity = block_table.shape[1] * forest.block_size
        raise ValueError(f"seq_lens must be <= {capacity}, got {int(seq_lens.max())}")

    shared_blocks = np.zeros(forest.num_rows, dtype=np.int32)
    for level in forest.levels:
        for group in level:
            shared_blocks[group.rows] = group.segment.end
    context_lens = seq_lens - shared_blocks * np.int32(forest.block_size)
    if (context_lens[shared_blocks > 0] < 1).any():
        raise ValueError("seq_lens must reach past the shared segments of every grouped row")

    rows, owners = _order_rows(forest)
    return RelayPlan(
        rows=rows,
        levels=tuple(
            _plan_level(level, owner, rows, block_table, forest.block_size)
            for level, owner in zip(forest.levels, owners, strict=True)
        ),
        context_block_table=_shift_left(block_table, shared_blocks, blocks_needed - shared_blocks),
        context_lens=context_lens,
    )


def _order_rows(forest: Forest) -> tuple[Int32Array, list[Int32Array]]:
    """Grouped rows in plan order, and per level the group index of each of them (-1: in none)."""
    owners = [np.full(forest.num_rows, -1, dtype=np.int32) for _ in forest.levels]
    for owner, level in zip(owners, forest.levels, strict=True):
        for index, group in enumerate(level):
            owner[group.rows] = index
    rows = np.flatnonzero(owners[0] >= 0).astype(np.int32)
    # lexsort's last key counts most: level 0 first, then nested groups inside it.
    rows = rows[np.lexsort([owner[rows] for owner in reversed(owners)])]
    return rows, [owner[rows] for owner in owners]


def _plan_level(
    level: Level, owner: Int32Array, rows: Int32Array, block_table: Int32Array, block_size: int
) -> LevelPlan:
    starts = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist()]
    table = np.zeros((len(starts), max(g.segment.blocks for g in level)), dtype=np.int32)
    seq_lens = np.zeros(len(starts), dtype=np.int32)
    for i, start in enumerate(starts):
        if owner[start] >= 0:
            segment = level[owner[start]].segment
            table[i, : segment.blocks] = block_table[rows[start], segment.start : segment.end]
            seq_lens[i] = segment.blocks * block_size
    cu_rows = np.array([*starts, len(rows)], dtype=np.int32)
    return LevelPlan(cu_rows, table, seq_lens, owner[starts])


def _shift_left(block_table: Int32Array, by: Int32Array, blocks: Int32Array) -> NDArray[np.int32]:
    """Columns ``[by, by + blocks)`` of each row, moved to column 0 and zero padded."""
    column = np.arange(int(blocks.max()), dtype=np.int32)
    source = np.minimum(by[:, None] + column, block_table.shape[1] - 1)
    shifted = np.take_along_axis(block_table, source, axis=1)
    shifted[column >= blocks[:, None]] = 0
    return shifted
