"""The policy: which groups of requests to relay.

At every node of the trie there is one choice, to end a group there or not, and its price (a call,
and the segment's first read) is weighed against what the requests below save. That is a recursion
from the leaves to the root, for each node once per group that may lie around it. Two families of
forests are tried: groups inside groups, with 1, 2, ... levels; and one level whose groups lie side
by side, where requests of one prefix may be in different groups. The forest with the least
predicted time (`cost.predict`) is taken, or none where no group pays by more than `Costs.margin`.

Over random steps, a grid and a recorded trace its predicted time is held to the optimum, found by
another search in tests/unit/sharing/optimum.py. On GPUs Triton kernels approximate it
(`ops.planning`).
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_relay.sharing.cost import Costs, StepShape, predict, predict_stock
from vllm_relay.sharing.forest import Forest, Group, Segment
from vllm_relay.sharing.trie import Trie

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """The groups of a step and their predicted cost.

    Attributes:
        forest: empty where no group pays.
        shape: the step that was predicted.
        stock, relay: seconds per layer (KV tokens with `reads`) of vLLM's own attention, and of our
            kernels with the forest.
    """

    forest: Forest
    shape: StepShape
    stock: float
    relay: float

    @property
    def ours(self) -> bool:
        """True if our kernels are predicted to be faster than vLLM's own attention."""
        return self.relay < self.stock


def choose(shape: StepShape, costs: Costs, max_levels: int) -> Choice:
    """The forest of at most ``max_levels`` levels that the policy takes.

    Raises:
        ValueError: max_levels < 1.
    """
    if max_levels < 1:
        raise ValueError(f"max_levels must be >= 1, got {max_levels}")
    best = Forest((), shape.trie.num_rows, shape.block_size)
    relay = alone = predict(best, shape, costs)
    if len(shape.trie):
        levels = min(max_levels, shape.trie.height)
        savings = _savings(shape, costs, levels)
        forests = [_best_groups(shape, costs, savings, 1, nested=False)]
        # The recursion sees every price but that of a level.
        for most in range(1, levels + 1) if costs.level else [levels]:
            forests.append(_best_groups(shape, costs, savings, most, nested=True))
        for forest in forests:
            cost = predict(forest, shape, costs)
            if cost < relay and cost * (1 + costs.margin) < alone:
                best, relay = forest, cost
    return Choice(forest=best, shape=shape, stock=predict_stock(shape, costs), relay=relay)


@dataclass(frozen=True, eq=False)
class _Savings:
    """Savings of requests, by the node where their last group ends and the number of their groups.

    Attributes:
        path: nodes from the root to each node, itself included.
        rows: per node [requests at it, nodes of its path, levels + 1], beside the price of groups.
    """

    path: list[list[int]]
    rows: list[Floats]


def _savings(shape: StepShape, costs: Costs, levels: int) -> _Savings:
    trie, size = shape.trie, shape.block_size
    context, system = costs.context, costs.system
    depth = np.array(trie.depth, dtype=np.float64) * size
    share = np.array([trie.share(node, trie.depth[node]) for node in range(len(depth))]) * size
    path: list[list[int]] = []
    saved: list[Floats] = []
    for node, parent in enumerate(trie.parent):
        path.append([*path[parent], node] if node else [0])
        rows, ends = trie.rows[node], path[node]
        if not len(rows):
            saved.append(np.zeros((0, len(ends), levels + 1)))
            continue
        lens = shape.seq_lens[rows].astype(np.float64)
        queries = shape.query_lens[rows].astype(np.float64)
        first = lens - depth[node] + share[node]
        alone = context.first * first + costs.reading(context, lens)
        alone += context.pair * queries * lens
        left = lens[:, None] - depth[ends]
        in_context = context.first * (first[:, None] - share[ends]) + costs.reading(context, left)
        in_context += queries[:, None] * context.pair * left
        in_system = queries[:, None] * system.pair * depth[ends]
        per_level = (system.token + costs.fusion) * queries
        groups = np.arange(levels + 1)
        gain = alone[:, None] - in_context - in_system
        of_node = gain[:, :, None] - per_level[:, None, None] * groups
        of_node[:, :, 0] = 0.0
        saved.append(of_node)
    return _Savings(path, saved)


def _best_groups(
    shape: StepShape, costs: Costs, savings: _Savings, levels: int, *, nested: bool
) -> Forest:
    """The groups that save most: inside one another, or, not ``nested``, one level side by side."""
    trie, system = shape.trie, costs.system
    depth = np.array(trie.depth, dtype=np.float64) * shape.block_size
    # Per node [nodes of its path where the group around ends, number of groups around]: savings of
    # the requests at and below the node, and whether a group ends here.
    worth = [
        np.maximum(rows[:, :, : levels + 1], 0.0).sum(axis=0, initial=0.0) for rows in savings.rows
    ]
    ends_here: list[NDArray[np.bool_]] = [np.empty(0, dtype=np.bool_)] * len(trie.depth)
    for node in range(len(trie.depth) - 1, 0, -1):
        path, around = savings.path[node], worth[node][:-1]
        with_group = np.full_like(around, -np.inf)
        starts = depth[path[:-1]] if nested else np.zeros(len(path) - 1)
        price = system.call + system.first * (depth[node] - starts)
        if nested:
            with_group[:, :-1] = worth[node][-1, 1:] - price[:, None]
        else:
            with_group[:] = worth[node][-1, 1] - price[:, None]
        ends_here[node] = with_group > around
        worth[trie.parent[node]] += np.maximum(with_group, around)

    made: list[_Made] = []
    # Per node: the groups around its requests, and the place on its path where the last one ends.
    around_of: list[tuple[tuple[_Made, ...], int]] = [((), 0)] * len(trie.depth)
    for node in range(1, len(trie.depth)):
        around, end = around_of[trie.parent[node]]
        if ends_here[node][end, len(around)]:
            start = trie.depth[savings.path[node][end]] if nested else 0
            level = len(around) if nested else 0
            made.append(_Made(level, start, trie.depth[node]))
            around, end = (*around[:level], made[-1]), len(savings.path[node]) - 1
        around_of[node] = around, end
        joins = savings.rows[node][:, end, len(around)] > 0
        for group in around:
            group.rows += trie.rows[node][joins].tolist()
    return _forest(made, trie, shape.block_size)


@dataclass(eq=False)
class _Made:
    """A group while it is put together; ``start`` and ``end`` in blocks."""

    level: int
    start: int
    end: int
    rows: list[int] = field(default_factory=list)


def _forest(made: list[_Made], trie: Trie, block_size: int) -> Forest:
    """The groups in levels, each level in the order of the groups around; singletons are
    dropped."""
    levels: list[list[Group]] = []
    place = np.zeros(trie.num_rows, dtype=np.int64)  # of the group around each request
    for level in range(1 + max((group.level for group in made), default=-1)):
        groups = [
            Group(Segment(x.start, x.end - x.start), np.sort(np.array(x.rows, dtype=np.int32)))
            for x in made
            if x.level == level and len(x.rows) > 1
        ]
        groups.sort(key=lambda group: (place[group.rows[0]], group.rows[0]))
        for index, group in enumerate(groups):
            place[group.rows] = index
        if groups:
            levels.append(groups)
    return Forest(tuple(map(tuple, levels)), trie.num_rows, block_size)
