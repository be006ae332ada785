"""A forest laid out as the arrays of a `plan.Plan`, on the host."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_relay.plan import Part, Plan, SharingStats
from vllm_relay.sharing.forest import Forest, Group, Int32Array, Level, check_batch

HostPlan = Plan[NDArray[np.int32]]


def make_plan(
    forest: Forest, block_table: Int32Array, seq_lens: Int32Array, query_start_loc: Int32Array
) -> HostPlan:
    """The plan of one step, in arrays of its own.

    One order of the query tokens serves all levels: those of each group of each level are adjacent,
    those of ungrouped requests come last. Where a level leaves tokens out, a sequence without keys
    fills the gap, so that the k-th sequence with keys is the k-th group of the forest's level.

    Args:
        forest: of these requests, see `Forest`.
        block_table: int32 [R, M], the table that the forest was found in.
        seq_lens: int32 [R], length of each request with this step's query tokens; 0 for padding.
        query_start_loc: int32 [R + 1], offsets of each request's query tokens.

    Raises:
        ValueError: as `context_of`.
    """
    context = context_of(forest, block_table, seq_lens, query_start_loc)
    rows = forest.num_rows
    owners = [_owners(level, rows) for level in forest.levels]
    # lexsort's last key counts most: level 0 first, then nested groups inside it, -1 (none) last.
    keys = [np.where(owner < 0, rows, owner) for owner in reversed(owners)]
    order = np.lexsort(keys) if keys else np.arange(rows)
    queries = np.diff(query_start_loc)
    starts = np.concatenate([[0], queries[order].cumsum()]).astype(np.int32)
    levels = tuple(
        _lay_out(level, owner[order], starts, block_table, forest.block_size)
        for level, owner in zip(forest.levels, owners, strict=True)
    )
    place = np.empty(rows, dtype=np.int32)
    place[order] = starts[:-1]
    row_of_token = np.repeat(np.arange(rows), queries)
    places = np.arange(len(row_of_token), dtype=np.int32)
    places += (place - query_start_loc[:-1])[row_of_token]
    return Plan(
        levels=levels,
        context=context,
        index=np.array([np.where(o[row_of_token] < 0, -1, places) for o in owners], dtype=np.int32)
        if owners
        else np.empty((0, len(places)), dtype=np.int32),
    )


def context_of(
    forest: Forest, block_table: Int32Array, seq_lens: Int32Array, query_start_loc: Int32Array
) -> Part[Int32Array]:
    """The context of a plan: each request's tokens after its last segment, in arrays of its own.

    Args:
        forest, block_table, seq_lens, query_start_loc: as `make_plan`.

    Raises:
        ValueError: a wrong shape or dtype, a forest of another batch, a length below 0, beyond the
            block table, or that leaves a grouped request no token after its segments.
    """
    check_batch(block_table, seq_lens, forest.block_size, lens_name="seq_lens")
    rows = len(block_table)
    if forest.num_rows != rows:
        raise ValueError(f"forest has {forest.num_rows} rows, block_table {rows}")
    if query_start_loc.shape != (rows + 1,):
        raise ValueError(f"query_start_loc must be int32 [{rows + 1}]")
    needed = -(-seq_lens // forest.block_size)
    if rows and needed.max() > block_table.shape[1]:
        capacity = block_table.shape[1] * forest.block_size
        raise ValueError(f"seq_lens must be <= {capacity}, got {int(seq_lens.max())}")
    shared = np.zeros(rows, dtype=np.int32)
    for level in forest.levels:
        for group in level:
            shared[group.rows] = group.segment.end
    context_lens = seq_lens - shared * np.int32(forest.block_size)
    if (context_lens[shared > 0] < 1).any():
        raise ValueError("seq_lens must reach past the shared segments of every grouped request")
    return Part(
        query_start_loc=query_start_loc.copy(),
        seq_lens=context_lens,
        block_table=_shift_left(block_table, shared, needed - shared),
        max_query_len=int((query_start_loc[1:] - query_start_loc[:-1]).max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        causal=True,
        key_starts=shared * np.int32(forest.block_size),
    )


def stats_of(forest: Forest, seq_lens: NDArray[np.signedinteger[Any]]) -> SharingStats:
    """Numbers of what a step with these groups shares; ``seq_lens`` [R] as in `make_plan`."""
    groups = [group for level in forest.levels for group in level]
    tokens = [group.segment.blocks * forest.block_size for group in groups]
    return SharingStats(
        groups=len(groups),
        requests=sum(len(group.rows) for group in forest.levels[0]) if groups else 0,
        tokens_shared=sum(tokens),
        tokens_saved=sum((len(g.rows) - 1) * n for g, n in zip(groups, tokens, strict=True)),
        tokens_stock=int(seq_lens.sum()),
        steps=1,
        steps_relayed=int(bool(groups)),
    )


def largest_groups(forest: Forest, most: int) -> list[dict[str, int]]:
    """Up to ``most`` groups: ``level``, ``requests`` and ``tokens``, those that save most first.

    Each is followed by the groups inside of it.
    """
    found: list[dict[str, int]] = []

    def add(level: int, around: Int32Array) -> None:
        inside = [group for group in forest.levels[level] if group.rows[0] in around]
        for group in sorted(inside, key=lambda g: -len(g.rows[1:]) * g.segment.blocks):
            tokens = int(group.segment.blocks) * forest.block_size
            found.append({"level": level, "requests": len(group.rows), "tokens": tokens})
            if level + 1 < len(forest.levels):
                add(level + 1, group.rows)

    if forest.levels:
        add(0, np.arange(forest.num_rows, dtype=np.int32))
    return found[:most]


def blocks_of(group: Group, block_table: Int32Array) -> Int32Array:
    """The KV blocks of a group's segment, int32; ``block_table`` [R, M] as in `make_plan`."""
    return block_table[group.rows[0], group.segment.start : group.segment.end]


def _owners(level: Level, rows: int) -> Int32Array:
    """The group of each request, int32 [R]; -1 for none."""
    owner = np.full(rows, -1, dtype=np.int32)
    for index, group in enumerate(level):
        owner[group.rows] = index
    return owner


def _lay_out(
    level: Level, owner: Int32Array, starts: Int32Array, block_table: Int32Array, block_size: int
) -> Part[Int32Array]:
    """System attention of one level; ``owner`` and ``starts`` of the requests in plan order."""
    first = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1])
    table = np.zeros((len(first), max(g.segment.blocks for g in level)), dtype=np.int32)
    lens, key_starts = np.zeros((2, len(first)), dtype=np.int32)
    for sequence, group in enumerate(owner[first].tolist()):
        if group >= 0:
            blocks = blocks_of(level[group], block_table)
            table[sequence, : len(blocks)] = blocks
            lens[sequence] = len(blocks) * block_size
            key_starts[sequence] = level[group].segment.start * block_size
    query_start_loc = starts[[*first, -1]]
    return Part(
        query_start_loc=query_start_loc,
        seq_lens=lens,
        block_table=table,
        max_query_len=int(np.diff(query_start_loc).max()),
        max_seq_len=int(lens.max()),
        causal=False,
        key_starts=key_starts,
    )


def _shift_left(block_table: Int32Array, by: Int32Array, blocks: Int32Array) -> Int32Array:
    """Columns ``[by, by + blocks)`` of each request, moved to column 0 and zero padded."""
    column = np.arange(int(blocks.max(initial=0)), dtype=np.int32)
    source = np.minimum(by[:, None] + column, block_table.shape[1] - 1)
    shifted = block_table[np.arange(len(by))[:, None], source]
    shifted[column >= blocks[:, None]] = 0
    return shifted
