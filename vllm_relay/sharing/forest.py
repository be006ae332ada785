"""Block tables and lengths -> forest: which requests share which leading KV blocks."""

from dataclasses import dataclass
from operator import add

import numpy as np
from numpy.typing import NDArray

from vllm_relay.sharing._checks import check_batch

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class Segment:
    """Columns ``[start, start + blocks)`` of the block table, both in blocks."""

    start: int
    blocks: int

    @property
    def end(self) -> int:
        return self.start + self.blocks


@dataclass(frozen=True, eq=False)
class Group:
    """A segment with the requests that attend to it: ``rows`` int32, ascending, at least two."""

    segment: Segment
    rows: Int32Array


Level = tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Forest:
    """Levels of disjoint groups, outermost first; no levels means that nothing is shared.

    A group of level i + 1 serves some rows of one group of level i and its segment starts where
    that one ends, so the segments of a row are consecutive columns from column 0 on.
    """

    levels: tuple[Level, ...]
    num_rows: int
    block_size: int

    @property
    def num_groups(self) -> int:
        return sum(len(level) for level in self.levels)

    def validate(self) -> None:
        """Check the structure; whether the blocks are really shared is for the block table to say.

        Raises:
            ValueError: the first rule that is broken.
        """
        if self.block_size < 1 or self.num_rows < 0:
            raise ValueError("forest: block_size must be >= 1 and num_rows >= 0")
        parent = np.zeros(self.num_rows, dtype=np.int32)  # one common root above level 0
        end_of = {0: 0}
        for depth, level in enumerate(self.levels):
            if not level:
                raise ValueError(f"forest: level {depth} is empty")
            owner = np.full(self.num_rows, -1, dtype=np.int32)
            for index, group in enumerate(level):
                name = f"forest: level {depth}, group {index}"
                self._validate_group(group, name)
                parents = np.unique(parent[group.rows])
                if len(parents) != 1 or parents[0] < 0:
                    raise ValueError(f"{name}: rows must lie in one group of the level above")
                if group.segment.start != end_of[int(parents[0])]:
                    raise ValueError(f"{name}: the segment must start where the one above ends")
                if (owner[group.rows] >= 0).any():
                    raise ValueError(f"{name}: a row is in another group of this level")
                owner[group.rows] = index
            parent = owner
            end_of = {index: group.segment.end for index, group in enumerate(level)}

    def _validate_group(self, group: Group, name: str) -> None:
        rows = group.rows
        if rows.dtype != np.int32 or rows.ndim != 1 or len(rows) < 2:
            raise ValueError(f"{name}: rows must be int32 [>= 2]")
        if rows[0] < 0 or rows[-1] >= self.num_rows or (np.diff(rows) <= 0).any():
            raise ValueError(f"{name}: rows must ascend within [0, {self.num_rows})")
        if group.segment.blocks < 1:
            raise ValueError(f"{name}: a segment has at least one block")


def find_forest(block_table: Int32Array, computed_lens: Int32Array, block_size: int) -> Forest:
    """Find disjoint groups of requests with the same leading blocks that save most KV reads.

    Two rows share a block iff they hold the same id at the same column and at every column before
    it: identity is the physical block (contract 2). Of all ways to put rows into disjoint groups,
    each with one depth, the result maximises ``sum((members - 1) * blocks)``; among equals it has
    the fewest groups, then the most members.

    Args:
        block_table: int32 [R, M], block ids. Columns past a row's computed blocks are not trusted.
        computed_lens: int32 [R], tokens of each row computed before its first query token of this
            step; 0 for padding. Only full blocks count (contract 1), and an id <= 0 (vLLM's null
            block) ends them. More tokens than the table holds count as all it holds.
        block_size: tokens per block.

    Returns:
        A forest of at most one level; groups are in the order of their first rows.

    Raises:
        ValueError: a wrong shape or dtype, a negative length, block_size < 1.
    """
    check_batch(block_table, computed_lens, block_size, lens_name="computed_lens")
    num_rows, num_columns = block_table.shape
    groups: Level = ()
    if num_rows > 1 and num_columns > 0:
        rows = _rows_sharing_first_block(block_table, computed_lens, block_size)
        if len(rows):
            depths = np.minimum(computed_lens[rows] // block_size, num_columns)
            groups = _best_groups(_build_trie(rows, block_table, depths), len(rows))
    return Forest((groups,) if groups else (), num_rows, block_size)


def _rows_sharing_first_block(
    block_table: Int32Array, computed_lens: Int32Array, block_size: int
) -> NDArray[np.intp]:
    """Rows whose first block another row holds too. Steps without sharing pay for this alone."""
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


class _Node:
    """A branching point of the trie of rows: the rows below it share ``depth`` blocks.

    Attributes:
        rows: those that no deeper node holds.
        children: the next deeper nodes.
        parents: depths of the nodes above, the root's first.
        taken: best score below this node when it is a group.
        best: best score below this node, by which of ``parents`` is the closest group.
    """

    __slots__ = ("best", "children", "depth", "parents", "rows", "taken")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.rows: list[int] = []
        self.children: list[_Node] = []
        self.parents: list[int] = []
        self.taken = 0
        self.best: list[int] = []


def _build_trie(rows: NDArray[np.intp], block_table: Int32Array, depths: Int32Array) -> _Node:
    """The compressed trie of ``rows``, without leaves: sort, then compare neighbours."""
    width = int(depths.max())
    blocks = block_table[rows, :width]
    # Stale columns must neither match nor separate rows: from here on an id <= 0 ends a row.
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

    path = [_Node(0)]
    for row, ahead in zip(rows[order].tolist(), [*common.tolist(), 0], strict=True):
        if ahead > path[-1].depth:
            path.append(_Node(ahead))
        path[-1].rows.append(row)
        while path[-1].depth > ahead:
            done = path.pop()
            if path[-1].depth < ahead:
                path.append(_Node(ahead))
            path[-1].children.append(done)
    return path[0]


def _best_groups(root: _Node, num_rows: int) -> Level:
    """Choose the nodes that become groups; each row joins the deepest chosen node above it.

    The rows below a node may be split between it and chosen nodes below it, so whether a node pays
    depends on the closest chosen node above. Over nodes v and that node's depth a (0: none):

        best(v, a) = max(skip(v, a), skip(v, v.depth) - cost of a group at v)
        skip(v, a) = len(v.rows) * join(a) + sum(best(child, a) for child of v)

    A group of depth d costs d reads and each row that joins it saves d. A score is one integer that
    orders by reads saved, then fewer groups, then more members.
    """
    unit = num_rows + 1
    weight = unit * unit

    def join(depth: int) -> int:
        return depth * weight + 1 if depth else 0

    # Loops, not recursion: a chain of nodes can be deeper than Python's stack.
    nodes: list[_Node] = []
    todo = [root]
    while todo:
        node = todo.pop()
        nodes.append(node)
        below = [*node.parents, node.depth]
        for child in node.children:
            child.parents = below
        todo += node.children

    for node in reversed(nodes):  # children before parents
        count = len(node.rows)
        skip = [count * join(depth) for depth in node.parents]
        skip.append(count * join(node.depth))
        for child in node.children:
            skip = list(map(add, skip, child.best))
        node.taken = skip.pop() - node.depth * weight - unit
        node.best = [score if score > node.taken else node.taken for score in skip]

    groups: list[tuple[int, list[int]]] = []
    unvisited: list[tuple[_Node, int, list[int]]] = [(child, 0, []) for child in root.children]
    while unvisited:
        node, closest, members = unvisited.pop()
        if node.best[closest] == node.taken:
            closest, members = len(node.parents), []
            groups.append((node.depth, members))
        members += node.rows
        unvisited += [(child, closest, members) for child in node.children]
    made = [Group(Segment(0, d), np.sort(np.array(rows, dtype=np.int32))) for d, rows in groups]
    return tuple(sorted(made, key=lambda group: int(group.rows[0])))
