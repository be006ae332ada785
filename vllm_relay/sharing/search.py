"""Which groups to relay: the forest with the least predicted time.

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

from vllm_relay.sharing._checks import check_batch
from vllm_relay.sharing.cost import Costs, StepShape, predict, predict_stock, reads
from vllm_relay.sharing.forest import Forest, Group, Int32Array, Level, Segment
from vllm_relay.sharing.trie import build_trie, thin

# Nodes of the trie on one path; tries that are deeper lose some.
MOST_NODES = 24
# `Planner` keeps a choice for so many steps of the same rows and blocks. Only contexts grow then,
# by a token or a few per step, and predictions change little.
KEEP_STEPS = 64


@dataclass(frozen=True, eq=False)
class Choice:
    """The groups of a step, and what they are predicted to change.

    Attributes:
        forest: empty where vLLM's own attention is predicted to be as fast.
        shape: what was predicted from.
        stock, relay: predicted cost, in seconds per layer (or KV tokens, with `reads`), of the step
            without groups and with these. Equal where there are none.
    """

    forest: Forest
    shape: StepShape
    stock: float
    relay: float


def find_forest(
    block_table: Int32Array,
    computed_lens: Int32Array,
    block_size: int,
    *,
    seq_lens: Int32Array | None = None,
    costs: Costs | None = None,
    max_levels: int = 1,
) -> Forest:
    """The groups of requests whose shared leading blocks are best read once.

    Two rows share a block iff they hold the same id at the same column and at every column before
    it: identity is the physical block (contract 2).

    Args:
        block_table: int32 [R, M], block ids. Columns past a row's computed blocks are not trusted.
        computed_lens: int32 [R], tokens of each row computed before its first query token of this
            step; 0 for padding. Only full blocks count (contract 1), and an id <= 0 (vLLM's null
            block) ends them. More tokens than the table holds count as all it holds.
        block_size: tokens per block.
        seq_lens: int32 [R], the rows' lengths with this step's query tokens; one more than computed
            where None.
        costs: what to minimise; the KV tokens that are read where None.
        max_levels: most levels of groups.

    Returns:
        A forest; the groups of a level are in the order of their first rows.

    Raises:
        ValueError: a wrong shape or dtype, a negative length, block_size or max_levels < 1.
    """
    check_batch(block_table, computed_lens, block_size, lens_name="computed_lens")
    if seq_lens is None:
        seq_lens = computed_lens + np.int32(1)
    check_batch(block_table, seq_lens, block_size, lens_name="seq_lens")
    trie = build_trie(block_table, computed_lens, block_size)
    shape = StepShape(trie, block_size, seq_lens, seq_lens - computed_lens)
    return choose(shape, reads() if costs is None else costs, max_levels).forest


def choose(shape: StepShape, costs: Costs, max_levels: int) -> Choice:
    """The forest of at most ``max_levels`` levels with the least predicted cost.

    Raises:
        ValueError: max_levels < 1.
    """
    if max_levels < 1:
        raise ValueError(f"max_levels must be >= 1, got {max_levels}")
    stock = predict_stock(shape, costs)
    best = Forest((), shape.trie.num_rows, shape.block_size)
    relay = stock
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
    return Choice(best, shape, stock, relay)


class Planner:
    """Chooses the groups of step after step; one like the last costs next to nothing.

    Args:
        block_size: tokens per block. costs, max_levels: as `choose`.
    """

    def __init__(self, block_size: int, costs: Costs, max_levels: int) -> None:
        self.block_size = block_size
        self.costs = costs
        self.max_levels = max_levels
        self._kept: _Kept | None = None

    def plan(self, block_table: Int32Array, seq_lens: Int32Array, query_lens: Int32Array) -> Choice:
        """The groups of one step; arguments as `StepShape`, errors as `find_forest`.

        The predictions are those of the step in which the groups were chosen.
        """
        kept = self._kept
        if kept is not None and kept.holds(block_table, seq_lens, query_lens, self.block_size):
            return kept.choice
        computed = _computed(seq_lens, query_lens)
        check_batch(block_table, computed, self.block_size, lens_name="computed lengths")
        trie = build_trie(block_table, computed, self.block_size)
        shape = StepShape(trie, self.block_size, seq_lens.copy(), query_lens.copy())
        choice = choose(shape, self.costs, self.max_levels)
        # One column more than two rows share: there they differ, or one of them ends.
        width = min(trie.width + 1, block_table.shape[1])
        self._kept = _Kept(
            block_table[:, :width].copy(), np.minimum(computed // self.block_size, width), choice
        )
        return choice


def _computed(seq_lens: Int32Array, query_lens: Int32Array) -> Int32Array:
    """Tokens before each row's first query; none of rows without a query, which share nothing."""
    return np.where(query_lens > 0, seq_lens - query_lens, np.int32(0))


@dataclass(eq=False)
class _Kept:
    """A choice, and the part of the step that it was made from.

    While the leading columns and, within them, the computed blocks of every row are the same, so is
    the trie: two rows differ, or one ends, before the last of these columns.
    """

    columns: Int32Array
    blocks: Int32Array
    choice: Choice
    steps: int = field(default=0)

    def holds(
        self, block_table: Int32Array, seq_lens: Int32Array, query_lens: Int32Array, block_size: int
    ) -> bool:
        self.steps += 1
        if self.steps > KEEP_STEPS or len(block_table) != len(self.columns):
            return False
        width = self.columns.shape[1]
        blocks = np.minimum(_computed(seq_lens, query_lens) // block_size, width)
        return (
            block_table.shape[1] >= width
            and np.array_equal(query_lens, self.choice.shape.query_lens)
            and np.array_equal(blocks, self.blocks)
            and np.array_equal(block_table[:, :width], self.columns)
        )


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
        self.shape, self.costs = shape, costs.beside_groups()
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
        stock, context, system = self.costs.stock, self.costs.context, self.costs.system
        rows = self.trie.rows[node]
        lens = self.shape.seq_lens[rows].astype(np.float64)
        queries = self.shape.query_lens[rows].astype(np.float64)
        share = np.array([self.share[n] for n in self.path[node]])
        first = lens - ends[-1] + share[-1]
        everything = (
            (stock.token - context.token - self.costs.fusion) * queries
            + (stock.first - context.first) * first
            + stock.reading(lens)
            + (stock.pair - context.pair) * queries * lens
        )
        per_level = (self.costs.fusion + system.token) * queries
        per_token = queries * (context.pair - system.pair)
        by_end = context.first * share + per_token[:, None] * ends
        by_end = by_end - context.reading(lens[:, None] - ends)
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
    ordered: list[Level] = [
        tuple(sorted(level, key=lambda group: int(group.rows[0]))) for level in levels if level
    ]
    return Forest(tuple(ordered), shape.trie.num_rows, shape.block_size)
