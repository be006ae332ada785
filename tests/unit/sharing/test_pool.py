"""Plan and ops together on a simulated block pool, against attention over the true tokens."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.sharing.forests import check_forest, find_forest
from tests.unit.sharing.simulated_pool import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_BLOCKS,
    Batch,
    SimulatedPool,
)
from vllm_relay.ops import context_attention, relay_fusion, system_attention
from vllm_relay.sharing import (
    Forest,
    Group,
    HostPlan,
    Planner,
    Segment,
    make_plan,
    reads,
)

QUERY_HEADS = 2
TOLERANCE = 1e-5  # fp32 attention over at most 56 tokens of unit-variance values

Finder = Callable[[Batch], Forest]
PlanMaker = Callable[[Forest, Batch], HostPlan]
SegmentReader = Callable[[SimulatedPool, list[int]], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def find(batch: Batch) -> Forest:
    return find_forest(batch.block_table, batch.seq_lens - batch.query_lens, BLOCK_SIZE)


def planner(levels: int = 3) -> Finder:
    """What the backend asks from step to step: it keeps forests as long as they hold."""
    made = Planner(BLOCK_SIZE, reads(), levels)
    return lambda batch: made.plan(batch.block_table, batch.seq_lens, batch.query_lens).forest


def plan(forest: Forest, batch: Batch) -> HostPlan:
    starts = np.concatenate([[0], batch.query_lens.cumsum()]).astype(np.int32)
    return make_plan(forest, batch.block_table, batch.seq_lens, starts)


def read_segment(pool: SimulatedPool, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.key_cache[blocks].flatten(0, 1), pool.value_cache[blocks].flatten(0, 1)


def relayed(
    pool: SimulatedPool, plan: HostPlan, q: torch.Tensor, starts: np.ndarray, read: SegmentReader
) -> torch.Tensor:
    out, lse = context_attention(
        q,
        pool.key_cache,
        pool.value_cache,
        torch.from_numpy(plan.context.block_table),
        torch.from_numpy(plan.context.seq_lens),
        torch.from_numpy(starts),
    )
    outs, lses = [out], [lse]
    for level, index in zip(plan.levels, plan.index, strict=True):
        order = np.full(len(q), -1)
        order[index[index >= 0]] = np.flatnonzero(index >= 0)
        # NaN stays in ungrouped requests: their LSE alone must say that there is nothing.
        out = torch.full_like(q, torch.nan)
        lse = torch.full((QUERY_HEADS, len(q)), -torch.inf)
        for i, tokens in enumerate(level.seq_lens.tolist()):
            if not tokens:
                continue
            mine = order[level.query_start_loc[i] : level.query_start_loc[i + 1]]
            k, v = read(pool, level.block_table[i, : tokens // BLOCK_SIZE].tolist())
            out[mine], lse[:, mine] = system_attention(q[mine], k, v)
        outs.append(out)
        lses.append(lse)
    return relay_fusion(outs, lses)


def truth(batch: Batch, q: torch.Tensor) -> torch.Tensor:
    """Plain causal attention per request over its own record of keys and values."""
    outs = [torch.empty_like(q[:0])]
    for request, mine in zip(batch.requests, q.split(batch.query_lens.tolist()), strict=True):
        if request is not None:
            length = request.computed
            k, v = request.keys[:length, 0], request.values[:length, 0]
            scores = torch.einsum("thd,sd->ths", mine, k) / HEAD_SIZE**0.5
            future = torch.ones(len(mine), length, dtype=torch.bool).triu(length - len(mine) + 1)
            weights = scores.masked_fill(future[:, None], -torch.inf).softmax(-1)
            outs.append(torch.einsum("ths,sd->thd", weights, v))
    return torch.cat(outs)


def run(
    seed: int,
    steps: int,
    find: Finder = find,
    plan: PlanMaker = plan,
    read: SegmentReader = read_segment,
) -> Counter[str]:
    """Count what was seen; under "mismatch" the steps whose outputs differ from the truth."""
    pool = SimulatedPool(seed)
    for step in range(steps):
        batch = pool.step()
        forest = find(batch)
        made = plan(forest, batch)
        starts = np.concatenate([[0], batch.query_lens.cumsum()]).astype(np.int32)
        q = torch.randn(int(starts[-1]), QUERY_HEADS, HEAD_SIZE, generator=pool.noise)
        expected = truth(batch, q)
        assert expected.isfinite().all(), "the simulation itself lost track of a token"
        pool.seen["two groups"] += sum(map(len, forest.levels)) > 1
        pool.seen["two levels"] += len(forest.levels) > 1
        if forest.levels:
            check_forest(forest)
            rows = np.concatenate([group.rows for group in forest.levels[0]])
            pool.seen["relayed"] += 1
            pool.seen["with ungrouped"] += len(rows) < int((batch.seq_lens > 0).sum())
            pool.seen["relayed prefill"] += int(batch.query_lens[rows].max()) > 2
        if len(q):
            out = relayed(pool, made, q, starts, read)
            if not (out - expected).abs().max() < TOLERANCE:  # NaN is a mismatch
                pool.seen["mismatch"] += 1
                pool.seen.setdefault("first mismatch", step)
    return pool.seen


def test_two_thousand_steps_without_a_mismatch() -> None:
    seed = 20261121
    seen = run(seed, 2000, planner())
    assert seen["mismatch"] == 0, f"seed {seed}: {seen}"
    # The run means something only if all of this happened in it.
    for event, at_least in {
        "relayed": 1000,
        "with ungrouped": 200,
        "relayed prefill": 100,
        "two groups": 200,
        "two levels": 50,
        "finished": 200,
        "preempted": 50,
        "evicted": 500,
        "hits": 500,
        "duplicated": 50,
        "padded": 500,
        "no request": 10,
        "one request": 20,
        "prefill": 100,
    }.items():
        assert seen[event] >= at_least, f"seed {seed}: {event} happened {seen[event]} times"


def skip_one_block(forest: Forest, batch: Batch) -> HostPlan:
    made = plan(forest, batch)
    if not made.levels:
        return made
    level = made.levels[0]
    shorter = np.where(level.seq_lens > BLOCK_SIZE, level.seq_lens - BLOCK_SIZE, level.seq_lens)
    return replace(made, levels=(replace(level, seq_lens=shorter),))


def one_block_too_deep(batch: Batch) -> Forest:
    forest = find(batch)

    def deepen(group: Group) -> Group:
        deeper = Segment(0, group.segment.blocks + 1)
        fits = batch.seq_lens[group.rows].min() > deeper.blocks * BLOCK_SIZE
        return Group(deeper, group.rows) if fits else group

    levels = tuple(tuple(deepen(group) for group in level) for level in forest.levels)
    return Forest(levels, forest.num_rows, forest.block_size)


def as_if_all_rows_decode(batch: Batch) -> Forest:
    return find_forest(batch.block_table, np.maximum(batch.seq_lens - 1, 0), BLOCK_SIZE)


def a_neighbours_block(forest: Forest, batch: Batch) -> HostPlan:
    made = plan(forest, batch)
    if made.levels:
        made.levels[0].block_table[0, 0] = made.levels[0].block_table[0, 0] % (NUM_BLOCKS - 1) + 1
    return made


def keep_copies() -> SegmentReader:
    """Copies of segments, found by block ids alone: what contract 2 forbids."""
    copies: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def read(pool: SimulatedPool, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return copies.setdefault(tuple(blocks), read_segment(pool, blocks))

    return read


@pytest.mark.parametrize(
    "fault",
    [
        {"plan": skip_one_block},
        {"find": one_block_too_deep},
        {"find": as_if_all_rows_decode},
        {"plan": a_neighbours_block},
        {"read": keep_copies()},
    ],
    ids=["block skipped", "too deep", "lengths unbounded", "wrong id", "stale copy"],
)
def test_planted_errors_are_caught(fault: dict) -> None:
    seen = run(7, 600, **fault)
    assert seen["mismatch"] > 0, f"seed 7: {seen}"
