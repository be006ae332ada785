"""Sharing under a sliding window: what requests see of a prefix that they have in common."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vllm_relay.sharing.forest import Forest, Group, Int32Array, Segment
from vllm_relay.sharing.trie import Trie

# Ids from here on stand for blocks that no request of the step sees.
UNSEEN = np.int32(1 << 30)


def without_null_blocks(block_table: Int32Array) -> Int32Array:
    """The block table int32 [R, M] with ids in the place of leading null blocks.

    vLLM's null block stands where a request sees nothing any more. A request gets the ids of one
    whose next block is the same, so that requests that see unequal parts of a prefix still share
    it; and ids from `UNSEEN` on where no request holds a block.
    """
    held = block_table > 0
    begins = np.where(held.any(axis=1), held.argmax(axis=1), 0)
    if not begins.any():
        return block_table
    table = block_table.copy()
    for column in np.unique(begins[begins > 0]).tolist():
        next_ids = table[:, column]
        # Requests that hold the block before; those with null blocks there are filled by now.
        holders = np.flatnonzero(begins < column)
        donors = dict(zip(next_ids[holders].tolist(), holders, strict=True))
        for row in np.flatnonzero(begins == column):
            donor = donors.get(int(next_ids[row]))
            before = UNSEEN + next_ids[row] if donor is None else table[donor, :column]
            table[row, :column] = before
    return table


def shifted(trie: Trie, first_seen: NDArray[np.signedinteger]) -> tuple[Trie, Int32Array]:
    """The trie without the blocks that none of those who share them sees.

    Args:
        first_seen: [R], the first block of each request that one of its queries sees.

    Returns:
        The trie, and blocks left out of each request, int32 [R]: of one that shares nothing, those
        that it does not see.
    """
    top = list(range(len(trie.depth)))  # the node below the root on the way to each
    for node, parent in enumerate(trie.parent):
        if parent > 0:
            top[node] = top[parent]
    left_out = list(trie.depth)
    for node, rows in enumerate(trie.rows):
        if node and len(rows):
            left_out[top[node]] = min(left_out[top[node]], int(first_seen[rows].min()))
    of_request = first_seen.astype(np.int32)
    for node, rows in enumerate(trie.rows):
        if node:
            of_request[rows] = left_out[top[node]]
    depth = [d - left_out[top[node]] if node else 0 for node, d in enumerate(trie.depth)]
    return replace(trie, depth=depth), of_request


def shifted_back(forest: Forest, left_out: Int32Array) -> Forest:
    """The forest found in a shifted trie, in columns of the block table."""
    levels = tuple(
        tuple(
            Group(Segment(group.segment.start + int(left_out[group.rows[0]]), group.segment.blocks),
                  group.rows)
            for group in level
        )
        for level in forest.levels
    )  # fmt: skip
    return replace(forest, levels=levels)
