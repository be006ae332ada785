"""The optimum that tests compare the policy with: the forest with the least predicted time.

By the cost model (`sharing.cost`) a group costs a call and its segment's first read; a row in a
group saves what the rest of its sequence no longer costs. Both depend only on where the row's last
segment ends and on how many levels lie above it. So the best forest is found from the leaves of the
trie to its root. The state at a node is

    i: the node above it where the innermost group of its rows ends (0: they are in none)
    m: how many levels that group and those around it are
    j: the node above it where another group ends that its rows may join, one level further in, or
       i where there is none

and the choices are to go on, to open a group at this node that starts at i (in place of j), or to
join j for good, so that groups may be opened inside it. Rows take the deepest group there is, or
none where that costs less. That j is kept open is what lets one group of a level reach deeper than
the rest of it where levels are few.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vllm_relay.sharing.cost import Costs, StepShape, predict, predict_stock
from vllm_relay.sharing.forest import Forest, Group, Level, Segment
from vllm_relay.sharing.policy import Choice
from vllm_relay.sharing.trie import Trie

# Nodes of the trie on one path; tries that are deeper lose some.
MOST_NODES = 24


def optimum(shape: StepShape, costs: Costs, max_levels: int) -> Choice:
    """The forest of at most ``max_levels`` levels with the least predicted cost.

    Raises:
        ValueError: max_levels < 1.
    """
    if max_levels < 1:
        raise ValueError(f"max_levels must be >= 1, got {max_levels}")
    best = Forest((), shape.trie.num_rows, shape.block_size)
    relay = predict(best, shape, costs)
    levels = max_levels if len(shape.trie) else 0
    nest: frozenset[int] = frozenset()
    while levels > 0:
        search = _Search(shape, costs, levels, nest)
        forests = [search.forest()]
        lonely = search.lonely - nest
        if lonely:
            # The search takes one row for a group, too. Try with no row left out, then with the
            # groups below these nodes inside of them.
            forests.append(search.forest(stay=True))
        for forest in forests:
            cost = predict(forest, shape, costs)
            if cost < relay:
                best, relay = forest, cost
        nest |= lonely
        if not lonely:
            # Nor does it see that levels cost something: try with fewer.
            levels = min(levels, len(forests[0].levels)) - 1 if costs.level else 0
    return Choice(forest=best, shape=shape, stock=predict_stock(shape, costs), relay=relay)


def thin(trie: Trie, most: int) -> Trie:
    """The trie with at most about ``most`` nodes on every path; rows move to the node above.

    Choosing groups takes time that grows with the square of a path's nodes. Only rows that each
    share one block more than the last make paths this long.
    """
    height = [0] * len(trie.depth)
    for node in range(1, len(height)):
        height[node] = height[trie.parent[node]] + 1
    if max(height) <= most:
        return trie
    step = -(-trie.width // most)
    kept, depth, parent, rows, count = [0] * len(height), [0], [-1], [[trie.rows[0]]], [0]
    for node in range(1, len(height)):
        above = kept[trie.parent[node]]
        if above and trie.depth[node] // step == depth[above] // step:
            kept[node] = above
            rows[above].append(trie.rows[node])
            continue
        kept[node] = len(depth)
        depth.append(trie.depth[node])
        parent.append(above)
        rows.append([trie.rows[node]])
        count.append(trie.count[node])
    return Trie(depth, parent, [np.concatenate(r) for r in rows], count, trie.num_rows)


@dataclass(eq=False)
class _Open:
    """A group while it is put together; ``end`` in blocks."""

    level: int
    parent: "_Open | None"
    node: int
    end: int
    rows: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.parent.end if self.parent else 0


Floats = NDArray[np.float64]


@lru_cache(maxsize=256)
def _states(levels: int, last: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
    """Of each state [m, i, j]: where its rows' last group ends, in how many they are, i < j."""
    m, i, j = np.ogrid[: levels + 1, : last + 1, : last + 1]
    later = j > i
    ends = np.broadcast_to(np.maximum(i, j), (levels + 1, last + 1, last + 1))
    return ends, np.minimum(m + later, levels), later[0]


class _Search:
    """The dynamic programme of the module, over one trie and at most ``levels`` levels.

    Arrays are indexed [m, i, j], with nodes of the path counted from the root (0) on.
    """

    def __init__(self, shape: StepShape, costs: Costs, levels: int, nest: frozenset[int]) -> None:
        self.shape, self.costs = shape, costs
        self.trie = thin(shape.trie, MOST_NODES)
        # Nodes whose groups hold all rows below them; nodes of groups that only one row stayed in.
        self.nest, self.lonely = nest, frozenset[int]()
        # Per node: the path to it, the node included; what each state saves; and without a group
        # opened here; and with one, [m, i]; and what each row saves, [row, node of the path, m].
        self.path: list[list[int]] = []
        for node, above in enumerate(self.trie.parent):
            self.path.append([*self.path[above], node] if node else [0])
        self.levels = min(levels, max(len(path) for path in self.path) - 1)
        self.share = [self._share(node) for node in range(len(self.path))]
        self.saved: list[Floats] = [np.empty(0)] * len(self.path)
        self.going_on: list[Floats] = list(self.saved)
        self.opening: list[Floats] = list(self.saved)
        self.by_row: list[Floats] = list(self.saved)
        self._solve()

    def _share(self, node: int) -> float:
        size = self.shape.block_size
        return self.trie.share(node, self.trie.depth[node]) * size

    def _solve(self) -> None:
        below: list[list[int]] = [[] for _ in self.path]
        for node in range(len(self.path) - 1, 0, -1):
            below[self.trie.parent[node]].append(node)
            self._solve_node(node, below[node])

    def _solve_node(self, node: int, children: list[int]) -> None:
        path, system = self.path[node], self.costs.system
        last = len(path) - 1
        ends = np.array([self.trie.depth[n] for n in path]) * float(self.shape.block_size)
        self.by_row[node] = self._row_savings(node, ends)
        inside = np.maximum(self.by_row[node], 0).sum(axis=0)  # [node of the path, m]
        ends_at, levels_at, later = _states(self.levels, last)
        total = inside[ends_at, levels_at]
        for child in children:
            total = total + self.saved[child]
        self.going_on[node] = total[:, :last, :last]
        opening = np.full((self.levels + 1, last), -np.inf)
        # All rows below in this group for good, or free to join others of its level.
        inner = total[1:, last, last, None] if node in self.nest else total[:-1, :last, last]
        opening[:-1] = inner - system.call - system.first * (ends[last] - ends[:last])
        self.opening[node] = opening
        best = np.maximum(self.going_on[node], opening[:, :, None])
        nodes = np.arange(last)
        for level in range(self.levels - 1, -1, -1):
            joined = best[level + 1, nodes, nodes]
            best[level] = np.where(later[:-1, :-1], np.maximum(best[level], joined), best[level])
        self.saved[node] = best

    def _row_savings(self, node: int, ends: Floats) -> Floats:
        """What each row at ``node`` saves in a group that ends at each node of its path."""
        context, system = self.costs.context, self.costs.system
        rows = self.trie.rows[node]
        lens = self.shape.seq_lens[rows].astype(np.float64)
        queries = self.shape.query_lens[rows].astype(np.float64)
        share = np.array([self.share[n] for n in self.path[node]])
        everything = self.costs.reading(context, lens)
        per_level = (self.costs.fusion + system.token) * queries
        per_token = queries * (context.pair - system.pair)
        by_end = context.first * share + per_token[:, None] * ends
        by_end = by_end - self.costs.reading(context, lens[:, None] - ends)
        saved = (
            everything[:, None, None]
            + by_end[:, :, None]
            - per_level[:, None, None] * np.arange(self.levels + 1)
        )
        saved[:, 0] = 0  # in no group
        return saved

    def forest(self, stay: bool = False) -> Forest:
        """The groups behind the best value; with ``stay`` no row is left out of a group."""
        groups: list[_Open] = []
        # node, m, i, j, the group that ends at i, the one that ends at j
        todo: list[tuple[int, int, int, int, _Open | None, _Open | None]] = [
            (node, 0, 0, 0, None, None) for node, above in enumerate(self.trie.parent) if above == 0
        ]
        below: list[list[int]] = [[] for _ in self.path]
        for node in range(1, len(self.path)):
            below[self.trie.parent[node]].append(node)
        while todo:
            node, m, i, j, group, other = todo.pop()
            saved, going_on = self.saved[node], self.going_on[node][m, i, j]
            if saved[m, i, j] > going_on:
                if saved[m, i, j] != self.opening[node][m, i]:
                    todo.append((node, m + 1, j, j, other, other))
                    continue
                j = len(self.path[node]) - 1
                other = _Open(m, group, node, self.trie.depth[node])
                groups.append(other)
                if node in self.nest:
                    m, i, group = m + 1, j, other
            joined = other if j > i else group
            if joined is not None:
                pays = (self.by_row[node][:, j, m + (j > i)] > 0) | stay
                joined.rows += self.trie.rows[node][pays].tolist()
            todo += [(child, m, i, j, group, other) for child in below[node]]
        forest = _assemble(groups, self.shape)
        self.lonely = frozenset(group.node for group in groups if len(group.rows) < 2)
        return forest


def _assemble(groups: list[_Open], shape: StepShape) -> Forest:
    """A forest of the opened groups; rows belong to the groups around theirs, too.

    A group of one row is dropped: the row stays in the groups around it.
    """
    levels: list[list[Group]] = [[] for _ in range(1 + max((g.level for g in groups), default=-1))]
    for group in reversed(groups):  # inner ones come after those around them
        if group.parent is not None:
            group.parent.rows += group.rows
        if len(group.rows) > 1:
            segment = Segment(group.start, group.end - group.start)
            rows = np.sort(np.array(group.rows, dtype=np.int32))
            levels[group.level].append(Group(segment, rows))
    place = np.zeros(shape.trie.num_rows, dtype=np.int64)  # of the group around each row
    ordered: list[Level] = []
    for level in filter(None, levels):
        level.sort(key=lambda group: (place[group.rows[0]], group.rows[0]))
        for index, group in enumerate(level):
            place[group.rows] = index
        ordered.append(tuple(level))
    return Forest(tuple(ordered), shape.trie.num_rows, shape.block_size)
