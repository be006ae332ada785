"""What a plan must be, whoever made it: numpy's planner and the GPU's are held to the same."""

from collections.abc import Iterable

import numpy as np

# Members of a group and the ids of its segment's blocks.
PlannedGroup = tuple[list[int], list[int]]


def check_rows(
    levels: Iterable[Iterable[PlannedGroup]],
    context_block_table: np.ndarray,
    context_lens: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    block_size: int,
    query_lens: np.ndarray | None = None,
) -> None:
    """Segments, outermost first, and context give each row its own blocks, each once, in order.

    With ``query_lens`` also: segments end before a row's first query (contract 1).
    """
    blocks: list[list[int]] = [[] for _ in seq_lens]
    for level in levels:
        seen: list[int] = []
        for rows, segment in level:
            assert segment and len(rows) >= 2
            seen += rows
            for row in rows:
                blocks[row] += segment
        assert len(seen) == len(set(seen)), "a row is in two groups of a level"
    for row, tokens in enumerate(seq_lens.tolist()):
        shared = len(blocks[row]) * block_size
        context = int(context_lens[row])
        assert shared + context == tokens
        if query_lens is not None:
            assert shared <= max(tokens - int(query_lens[row]), 0)
        used = context_block_table[row, : -(-context // block_size)].tolist()
        assert blocks[row] + used == block_table[row, : -(-tokens // block_size)].tolist()
