"""`choose` against all forests of a few rows, and the levels of published trees."""

import random
from dataclasses import astuple, replace
from operator import add

import numpy as np
import pytest

from tests.sharing.exhaustive import Row, best_time
from vllm_relay.sharing import (
    Costs,
    KernelCosts,
    Planner,
    StepShape,
    build_trie,
    choose,
    predict,
    reads,
)

BLOCK_SIZE = 16


def step(rows: list[Row]) -> StepShape:
    width = max(len(blocks) for blocks, _, _ in rows) + 1
    table = np.full((len(rows), width), 5, dtype=np.int32)  # stale ids beyond a row's blocks
    for i, (blocks, _, _) in enumerate(rows):
        table[i, : len(blocks)] = blocks
    lens, queries = (np.array(x, dtype=np.int32) for x in list(zip(*rows, strict=True))[1:])
    computed = lens - queries
    trie = build_trie(table, computed.astype(np.int32), BLOCK_SIZE)
    return StepShape(trie, BLOCK_SIZE, lens, queries)


def random_rows(rng: random.Random, most: int) -> list[Row]:
    """Rows of up to 8 blocks, each a copy of a beginning of an earlier one, then its own."""
    names = iter(range(10, 10_000))
    rows: list[Row] = []
    for _ in range(rng.randint(2, most)):
        blocks: list[int] = []
        if rows and rng.random() < 0.85:
            source = rng.choice(rows)[0]
            blocks = source[: rng.randint(0, len(source))]
        blocks = [*blocks, *(next(names) for _ in range(rng.randint(0, 8 - len(blocks))))]
        queries = rng.choice([1, 1, 1, 2, 8, 40])
        over = rng.randint(0, BLOCK_SIZE - 1)
        rows.append((blocks, len(blocks) * BLOCK_SIZE + over + queries, queries))
    return rows


def random_kernel(rng: random.Random, call: float) -> KernelCosts:
    return KernelCosts(
        call * rng.random(), rng.random(), 2 * rng.random(), rng.random(), rng.random() / 2
    )


def random_costs(rng: random.Random) -> Costs:
    """Seconds are of no matter here; KV tokens cost about one.

    Context attention is vLLM's kernel, and something more for the LSE.
    """
    stock, more = random_kernel(rng, 8), random_kernel(rng, 8).times(rng.random())
    return Costs(
        stock=stock,
        context=KernelCosts(*map(add, astuple(stock), astuple(more))),
        system=replace(random_kernel(rng, 20), read=0.0),
        fusion=rng.random() / 2,
        step=10 * rng.random(),
        level=10 * rng.random(),
    )


@pytest.mark.parametrize("seed", range(240))
def test_within_five_percent_of_the_best_of_all_forests(seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 10 if seed % 8 == 0 else 7)
    costs = reads() if seed % 3 == 0 else random_costs(rng)
    levels = rng.randint(1, 4)
    shape = step(rows)
    choice = choose(shape, costs, levels)
    choice.forest.validate()
    assert len(choice.forest.levels) <= levels
    assert choice.relay == predict(choice.forest, shape, costs) <= choice.stock
    best = best_time(rows, BLOCK_SIZE, costs, levels)
    assert best - 1e-6 * abs(best) <= choice.relay <= 1.05 * best
