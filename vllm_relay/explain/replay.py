"""A log of requests, replayed: who would share what in each decode step, and what that is worth.

The replay is a closed loop. Requests are admitted in the order of their timestamps, so many decode
at once, and the place of one that has all its tokens goes to the next. In each decode step a
request attends to its prompt and to what it has generated, and generates one token. Prefill is not
modelled: the blocks that a prompt fills lie in the KV cache from the request's first step on, once
for all that have the same prompt up to there.

Nothing changes between two steps but lengths, until a request ends. So groups are chosen once per
batch, for the middle of its steps. KV tokens and predicted times change by the same amount from
step to step: their sums over the steps are exact.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_relay.explain.trace import Request, Trace
from vllm_relay.sharing.cost import Costs, StepShape, predict, predict_stock
from vllm_relay.sharing.forest import Forest
from vllm_relay.sharing.search import choose
from vllm_relay.sharing.trie import Trie, build_trie

Int64Array = NDArray[np.int64]


@dataclass
class SharedBy:
    """A segment that was relayed, in all steps in which it was.

    Attributes:
        start, tokens: where in the prompt it starts and how long it is, in tokens.
        level: of its group, from 1 on, the outermost it had. members: the most at once.
        steps: in which it was relayed. saved: KV tokens not read. first: the first of its requests.
    """

    start: int
    tokens: int
    level: int
    members: int
    steps: int
    saved: int
    first: Request


@dataclass
class Reasons:
    """Every KV token that vLLM's own attention reads, by what becomes of it; all steps.

    Attributes:
        saved: not read any more.
        repeated: read again though another request of the batch reads it, because a group would
            take longer, or more levels than are allowed.
        first_reads: read by several requests of the batch, once for the first of them.
        other_times: of blocks that other requests of the trace have too, but none at the same time.
        own: of prompts, in blocks that no other request has or that are not full.
        generated: by the request itself.
    """

    saved: int = 0
    repeated: int = 0
    first_reads: int = 0
    other_times: int = 0
    own: int = 0
    generated: int = 0


@dataclass(frozen=True)
class Interval:
    """Steps of one batch: when its newest request was sent (ms), and KV tokens that they read."""

    timestamp: float
    steps: int
    stock: int
    relay: int
    once: int


@dataclass
class Replay:
    """What a replay found.

    Attributes:
        requests: of the trace. concurrency: most that decode at once.
        steps, steps_relayed: decode steps, and those with at least one group.
        kv_tokens_stock: KV tokens per layer that vLLM's own attention reads, in all steps.
        kv_tokens_relay: with groups. kv_tokens_once: if each shared block were read once per step.
        seconds_stock, seconds_relay: of one layer's attention, predicted.
        levels_used: most in one step.
        groups: those that save most first. intervals: in order.
    """

    requests: int
    concurrency: int
    steps: int = 0
    steps_relayed: int = 0
    kv_tokens_stock: int = 0
    kv_tokens_relay: int = 0
    kv_tokens_once: int = 0
    seconds_stock: float = 0.0
    seconds_relay: float = 0.0
    levels_used: int = 0
    reasons: Reasons = field(default_factory=Reasons)
    groups: list[SharedBy] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)

    @property
    def saved(self) -> float:
        """Share of KV reads that groups save."""
        return 1 - self.kv_tokens_relay / self.kv_tokens_stock if self.kv_tokens_stock else 0.0

    @property
    def savable(self) -> float:
        """Share of KV reads that are repeated."""
        return 1 - self.kv_tokens_once / self.kv_tokens_stock if self.kv_tokens_stock else 0.0

    @property
    def predicted_speedup(self) -> float:
        """Of the attention of all decode steps."""
        return self.seconds_stock / self.seconds_relay if self.seconds_relay else 1.0


def replay(
    trace: Trace,
    concurrency: int,
    *,
    costs: Costs,
    seconds: Costs,
    max_levels: int,
    report: Callable[[int], None] | None = None,
) -> Replay:
    """Replay a trace, see the module.

    Args:
        concurrency: requests that decode at once, as long as there are so many.
        costs: what to minimise when groups are chosen: seconds, or KV tokens (`cost.reads`).
        seconds: what predicted times are made from.
        max_levels: most levels of groups in one step.
        report: called with the number of requests that have ended.

    Raises:
        ValueError: concurrency or max_levels < 1.
    """
    if concurrency < 1 or max_levels < 1:
        raise ValueError("concurrency and max_levels must be >= 1")
    running = [request for request in trace.requests if request.output_length]
    running.sort(key=lambda request: request.timestamp)
    batch = _Batch(running, concurrency, trace.block_tokens)
    found = Replay(len(trace.requests), concurrency)
    groups: dict[tuple[int, int], SharedBy] = {}
    while batch.admit():
        steps = int(batch.left.min())
        middle = {(steps - 1) // 2, steps // 2}
        shapes = [batch.shape(after) for after in sorted(middle)]
        forest = choose(shapes[0], costs, max_levels).forest
        _count(found, batch, shapes[0].trie, forest, steps)
        _remember(groups, batch, forest, steps)
        for shape in shapes:
            found.seconds_stock += steps / len(shapes) * predict_stock(shape, seconds)
            found.seconds_relay += steps / len(shapes) * predict(forest, shape, seconds)
        batch.step(steps)
        if report is not None:
            report(batch.admitted - len(batch.left))
    found.groups = sorted(groups.values(), key=lambda group: -group.saved)
    return found


class _Batch:
    """The requests that decode at once, one row each, in the order in which they came.

    Attributes:
        rows: int64 [R], their indices in ``requests``. lens: int64 [R], tokens that each attends to
            in its next step. left: int64 [R], steps that it has before it.
        common: int64 [R], blocks of each that some other request of the trace has too.
        table: int32 [R, M], these blocks.
    """

    def __init__(self, requests: list[Request], concurrency: int, block_tokens: int) -> None:
        self.requests, self.block_tokens = requests, block_tokens
        self.concurrency = min(concurrency, len(requests))
        self.admitted = 0
        self._trie: Trie | None = None  # of this batch
        times = Counter(block for request in requests for block in request.blocks)
        # Only these can be shared. An id stands for its path: no block after one of count 1 is.
        self._common = [sum(times[block] > 1 for block in r.blocks) for r in requests]
        self.table = np.zeros((0, max(self._common, default=0)), dtype=np.int32)
        self.rows, self.lens, self.left, self.common = (np.zeros(0, dtype=np.int64),) * 4

    def admit(self) -> bool:
        """Fill free places; False if nobody is left."""
        free = self.concurrency - len(self.rows)
        new = range(self.admitted, min(self.admitted + free, len(self.requests)))
        if new:
            requests = [self.requests[i] for i in new]
            common = [self._common[i] for i in new]
            table = np.zeros((len(new), self.table.shape[1]), dtype=np.int32)
            for row, request, blocks in zip(table, requests, common, strict=True):
                row[:blocks] = request.blocks[:blocks]
            self.table = np.concatenate([self.table, table])
            self.rows = np.append(self.rows, new)
            self.lens = np.append(self.lens, [r.input_length for r in requests])
            self.left = np.append(self.left, [r.output_length for r in requests])
            self.common = np.append(self.common, np.array(common, dtype=np.int64))
            self.admitted = new.stop
        return len(self.rows) > 0

    def shape(self, after: int) -> StepShape:
        """The step after so many more."""
        if self._trie is None:
            computed = (self.common * self.block_tokens).astype(np.int32)
            self._trie = build_trie(self.table, computed, self.block_tokens)
        lens = (self.lens + after).astype(np.int32)
        return StepShape(self._trie, self.block_tokens, lens, np.ones_like(lens))

    def step(self, steps: int) -> None:
        """Every row generates so many tokens; those that have all of theirs leave."""
        self._trie = None
        self.lens += steps
        self.left -= steps
        stay = self.left > 0
        if not stay.all():
            self.rows, self.lens, self.left = self.rows[stay], self.lens[stay], self.left[stay]
            self.common, self.table = self.common[stay], self.table[stay]


def _count(found: Replay, batch: _Batch, trie: Trie, forest: Forest, steps: int) -> None:
    """Add the KV tokens of so many steps."""
    size, requests = batch.block_tokens, batch.requests
    growth = len(batch.lens) * (steps * (steps - 1) // 2)
    stock = steps * int(batch.lens.sum()) + growth
    depth = np.zeros(len(batch.lens), dtype=np.int64)  # blocks shared in this batch
    different = 0  # blocks of these, each counted once
    for node, rows in enumerate(trie.rows):
        depth[rows] = trie.depth[node]
        if node:
            different += trie.depth[node] - trie.depth[trie.parent[node]]
    repeated = steps * size * trie.blocks_repeated()
    saved = (
        steps
        * size
        * sum(
            (len(group.rows) - 1) * group.segment.blocks
            for level in forest.levels
            for group in level
        )
    )
    prompts = sum(requests[row].input_length for row in batch.rows.tolist())

    found.steps += steps
    found.steps_relayed += steps if forest.levels else 0
    found.kv_tokens_stock += stock
    found.kv_tokens_relay += stock - saved
    found.kv_tokens_once += stock - repeated
    found.levels_used = max(found.levels_used, len(forest.levels))
    why = found.reasons
    why.saved += saved
    why.repeated += repeated - saved
    why.first_reads += steps * size * different
    why.other_times += steps * size * int((batch.common - depth).sum())
    why.own += steps * (prompts - size * int(batch.common.sum()))
    why.generated += stock - steps * prompts
    newest = requests[batch.admitted - 1].timestamp
    found.intervals.append(Interval(newest, steps, stock, stock - saved, stock - repeated))


def _remember(
    groups: dict[tuple[int, int], SharedBy], batch: _Batch, forest: Forest, steps: int
) -> None:
    """Add so many steps of each group to what is known of its segment."""
    size = batch.block_tokens
    for level, members in enumerate(forest.levels, 1):
        for group in members:
            segment, first, count = group.segment, int(group.rows[0]), len(group.rows)
            # Blocks stand for their paths: the last one says which segment it is, up to its start.
            key = int(batch.table[first, segment.end - 1]), segment.start
            known = groups.get(key)
            if known is None:
                request = batch.requests[int(batch.rows[first])]
                known = SharedBy(
                    segment.start * size, segment.blocks * size, level, 0, 0, 0, request
                )
                groups[key] = known
            known.level = min(known.level, level)
            known.members = max(known.members, count)
            known.steps += steps
            known.saved += steps * (count - 1) * segment.blocks * size
