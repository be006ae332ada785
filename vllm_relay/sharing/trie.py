"""The trie of a step: every way in which requests share leading KV blocks."""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Trie:
    """The compressed trie of requests that share, without leaves: each node has at least two
    requests.

    Attributes:
        depth: blocks shared by the requests at and below each node; node 0 is the root, of depth 0.
        parent: node above each one; parents come before their children. -1 for the root.
        rows: int32 per node, requests that no deeper node holds.
        count: requests at and below each node.
        num_rows: requests of the batch, those that share nothing included.
    """

    depth: list[int]
    parent: list[int]
    rows: list[Int32Array]
    count: list[int]
    num_rows: int

    def __len__(self) -> int:
        """Nodes without the root."""
        return len(self.depth) - 1

    @property
    def width(self) -> int:
        """Blocks of the longest prefix that two requests share."""
        return max(self.depth)

    @property
    def height(self) -> int:
        """Nodes on the longest path, the root left out."""
        return max(self.heights())

    def heights(self) -> list[int]:
        """Nodes on the path to each node, the root left out."""
        heights = [0] * len(self.depth)
        for node in range(1, len(heights)):
            heights[node] = heights[self.parent[node]] + 1
        return heights

    def share(self, node: int, depth: int) -> float:
        """The first ``depth`` blocks of a request at ``node``, each divided by its holders."""
        share = 0.0
        while node > 0:
            above = self.parent[node]
            share += max(min(depth, self.depth[node]) - self.depth[above], 0) / self.count[node]
            node = above
        return share

    def blocks_repeated(self) -> int:
        """Blocks that requests hold in all, less the distinct ones."""
        edges = zip(self.count[1:], self.depth[1:], self.parent[1:], strict=True)
        return sum((count - 1) * (depth - self.depth[parent]) for count, depth, parent in edges)


def build_trie(block_table: Int32Array, computed_lens: Int32Array, block_size: int) -> Trie:
    """The trie of a step; arguments as `Planner.plan`, with the tokens computed before queries."""
    num_rows, num_columns = block_table.shape
    if num_rows > 1 and num_columns > 0:
        rows = _rows_sharing_first_block(block_table, computed_lens, block_size)
        if len(rows):
            depths = np.minimum(computed_lens[rows] // block_size, num_columns)
            return _build(rows, block_table, depths)
    return Trie([0], [-1], [np.empty(0, dtype=np.int32)], [0], num_rows)


def limited(trie: Trie, most: int) -> Trie:
    """The trie with fewer nodes, so that `Trie.heights` add up to at most ``most``.

    A node is left out by giving its requests and children to the node above, which shares less. The
    one whose leaving repeats the fewest blocks goes first.
    """
    depth, above = trie.depth, trie.parent.copy()
    branches = [len(rows) for rows in trie.rows]  # requests and nodes directly below
    for parent in trie.parent[1:]:
        branches[parent] += 1
    gone = [False] * len(depth)

    def loss(node: int) -> int:
        """Blocks repeated without the node; it only grows while others leave."""
        while gone[above[node]]:
            above[node] = above[above[node]]
        return (depth[node] - depth[above[node]]) * (branches[node] - 1)

    heap = [(loss(node), node) for node in range(1, len(depth))]
    heapify(heap)
    left = trie
    while sum(left.heights()) > most:
        half = len(heap) // 2
        while len(heap) > half:
            known, node = heappop(heap)
            if (now := loss(node)) > known:
                heappush(heap, (now, node))
                continue
            gone[node] = True
            branches[above[node]] += branches[node] - 1
        left = _without(trie, gone)
    return left


def _without(trie: Trie, gone: list[bool]) -> Trie:
    """The trie without some nodes; node 0 stays."""
    kept = [node for node in range(len(gone)) if not gone[node]]
    place = {node: index for index, node in enumerate(kept)}
    rows: list[list[Int32Array]] = [[] for _ in kept]
    parent = []
    for node in range(len(gone)):
        above = trie.parent[node]
        if gone[node]:
            place[node] = place[above]
        else:
            parent.append(place[above] if node else -1)
        rows[place[node]].append(trie.rows[node])
    return Trie(
        [trie.depth[node] for node in kept],
        parent,
        [np.sort(np.concatenate(own)) for own in rows],
        [trie.count[node] for node in kept],
        trie.num_rows,
    )


def _rows_sharing_first_block(
    block_table: Int32Array, computed_lens: Int32Array, block_size: int
) -> NDArray[np.intp]:
    """Requests whose first block another one holds. Steps without sharing pay for this alone."""
    first = np.where(computed_lens >= block_size, block_table[:, 0], 0)
    order = first.argsort()
    first = first[order]
    same = first[1:] == first[:-1]
    same &= first[1:] > 0
    if not same.any():
        return order[:0]
    member = np.zeros(len(first), dtype=np.bool_)
    member[1:] = same
    member[:-1] |= same
    return order[member]


def _build(rows: NDArray[np.intp], block_table: Int32Array, depths: Int32Array) -> Trie:
    """Sort, then compare neighbours."""
    width = int(depths.max())
    blocks = block_table[rows, :width]
    # Stale columns must neither match nor separate requests: from here on an id <= 0 ends one.
    blocks[np.arange(width) >= depths[:, None]] = 0
    ends = blocks <= 0
    depths = np.where(ends.any(axis=1), ends.argmax(axis=1), width)
    # Any total order that keeps equal prefixes together will do; that of the bytes is the cheapest.
    keys = [row.tobytes() for row in blocks]
    order = sorted(range(len(keys)), key=keys.__getitem__)

    blocks, depths = blocks[order], depths[order]
    differs = blocks[1:] != blocks[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    common = np.minimum(common, np.minimum(depths[1:], depths[:-1]))

    # Nodes as they are finished, children first: depth, rows, children.
    done: list[tuple[int, list[int], list[int]]] = []
    path: list[tuple[int, list[int], list[int]]] = [(0, [], [])]
    for row, ahead in zip(rows[order].tolist(), [*common.tolist(), 0], strict=True):
        if ahead > path[-1][0]:
            path.append((ahead, [], []))
        path[-1][1].append(row)
        while path[-1][0] > ahead:
            done.append(path.pop())
            if path[-1][0] < ahead:
                path.append((ahead, [], []))
            path[-1][2].append(len(done) - 1)
    done.append(path[0])

    # In reverse every parent comes before its children.
    last = len(done) - 1
    parent, count = [-1] * len(done), [0] * len(done)
    for index, (_, own, children) in enumerate(done):
        node = last - index
        for child in children:
            parent[last - child] = node
        count[node] = len(own) + sum(count[last - child] for child in children)
    done.reverse()
    return Trie(
        [depth for depth, _, _ in done],
        parent,
        [np.array(sorted(own), dtype=np.int32) for _, own, _ in done],
        count,
        len(block_table),
    )
