"""The policy against the optimum, the optimum against all forests, and published trees."""

import random
from dataclasses import asdict, replace

import numpy as np
import pytest

from tests.unit.sharing.exhaustive import Row, best_time
from tests.unit.sharing.forests import check_forest
from tests.unit.sharing.optimum import optimum
from vllm_relay.sharing import (
    Choice,
    Costs,
    Forest,
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
    limits = {"call": call, "token": 1.0, "first": 2.0, "read": 1.0, "pair": 0.5, "far": 0.3}
    return KernelCosts(**{name: limit * rng.random() for name, limit in limits.items()})


def random_costs(rng: random.Random) -> Costs:
    """Seconds do not matter here; a KV token costs about one.

    Context attention costs what vLLM's kernel does, and something more. System attention reads the
    same memory: were that far cheaper, a request would gain from a group of its own.
    """
    stock, more = random_kernel(rng, 8), random_kernel(rng, 8).times(rng.random())
    both = asdict(more)
    return Costs(
        stock=stock,
        context=KernelCosts(**{name: cost + both[name] for name, cost in asdict(stock).items()}),
        system=replace(
            random_kernel(rng, rng.choice([20, 400])),
            first=stock.first * rng.uniform(0.5, 1.5),
            read=0.0,
            far=0.0,
        ),
        near=60.0,
        fusion=rng.choice([0.5, 20]) * rng.random(),
        step=10 * rng.random(),
        level=10 * rng.random(),
    )


def random_step(seed: int) -> tuple[list[Row], Costs, int]:
    """Requests, costs and most levels."""
    rng = random.Random(seed)
    rows = random_rows(rng, 10 if seed % 8 == 0 else 7)
    return rows, reads() if seed % 3 == 0 else random_costs(rng), rng.randint(1, 4)


def test_the_policy_is_near_the_optimum_over_3000_random_steps() -> None:
    over = []
    for seed in range(3000):
        rows, costs, levels = random_step(seed)
        shape = step(rows)
        choice = choose(shape, costs, levels)
        check_forest(choice.forest)
        assert len(choice.forest.levels) <= levels
        empty = Forest((), shape.trie.num_rows, BLOCK_SIZE)
        assert choice.relay == predict(choice.forest, shape, costs) <= predict(empty, shape, costs)
        over.append(choice.relay / optimum(shape, costs, levels).relay)
    assert np.mean(over) <= 1.03
    assert max(over) <= 1.15


def test_the_optimum_is_within_five_percent_of_the_best_of_all_forests() -> None:
    for seed in range(240):
        rows, costs, levels = random_step(seed)
        found = optimum(step(rows), costs, levels)
        check_forest(found.forest)
        best = best_time(rows, BLOCK_SIZE, costs, levels)
        assert best - 1e-6 * abs(best) <= found.relay <= 1.05 * best, seed


def groups_of(choice: Choice) -> list[list[tuple[int, int, list[int]]]]:
    return [
        [(g.segment.start, g.segment.end, g.rows.tolist()) for g in level]
        for level in choice.forest.levels
    ]


def test_a_planner_keeps_a_choice_only_as_long_as_it_holds() -> None:
    rng = random.Random(3)
    planner = Planner(BLOCK_SIZE, reads(), 3)
    ids = iter(range(1000, 10**6))
    kept = renewed = 0
    before: Choice | None = None
    rows = random_rows(rng, 10)
    for _ in range(600):
        event = rng.random()
        if event < 0.75:  # a decode step: new blocks are each row's own
            rows = [
                ([*blocks, next(ids)] if tokens % BLOCK_SIZE == 0 else blocks, tokens + 1, queries)
                for blocks, tokens, queries in rows
            ]
        elif event < 0.8:  # blocks that were in work are computed now, by rows that share them
            blocks, tokens, queries = rng.choice(rows)
            rows[rng.randrange(len(rows))] = (list(blocks), tokens + BLOCK_SIZE, queries)
        elif event < 0.85:  # a row's blocks are freed, and others take their place
            i = rng.randrange(len(rows))
            blocks, tokens, queries = rows[i]
            at = rng.randint(0, len(blocks))
            rows[i] = ([*blocks[:at], *(next(ids) for _ in blocks[at:])], tokens, queries)
        elif event < 0.9:
            rng.shuffle(rows)
        elif event < 0.95:  # another number of query tokens: fewer are computed
            i = rng.randrange(len(rows))
            rows[i] = (rows[i][0], rows[i][1], rng.randint(0, 9))
        else:
            rows = random_rows(rng, 10)
        width = max(len(blocks) for blocks, _, _ in rows) + 1
        table = np.full((len(rows), width), 5, dtype=np.int32)
        for i, (blocks, _, _) in enumerate(rows):
            table[i, : len(blocks)] = blocks
        lens, queries = (np.array(x, dtype=np.int32) for x in list(zip(*rows, strict=True))[1:])
        choice = planner.plan(table, lens, queries)
        assert groups_of(choice) == groups_of(
            Planner(BLOCK_SIZE, reads(), 3).plan(table, lens, queries)
        )
        kept += choice is before
        renewed += choice is not before
        before = choice
    assert kept > 150 and renewed > 100


def tree_of(nodes: list[int], tokens: list[int], block: int) -> StepShape:
    """A published tree: so many nodes of so many tokens per level, leaves last, one row each."""
    ids = iter(range(1, 10**6))
    rows: list[list[int]] = [[] for _ in range(nodes[-1])]
    for count, length in zip(nodes, tokens, strict=True):
        own = [[next(ids) for _ in range(length // block)] for _ in range(count)]
        for row, blocks in enumerate(rows):
            blocks += own[row * count // len(rows)]
    table = np.array(rows, dtype=np.int32)
    lens = np.full(len(rows), sum(tokens) + 1, dtype=np.int32)
    trie = build_trie(table, lens - np.int32(1), block)
    return StepShape(trie, block, lens, np.ones_like(lens))


@pytest.mark.parametrize(
    ("nodes", "tokens"),
    [
        ([1, 8, 512], [512, 256, 32]),
        ([4, 16, 256], [512, 32, 128]),
        ([1, 16, 32, 64, 128, 1024], [256, 128, 64, 32, 32, 32]),
    ],
)
@pytest.mark.parametrize("block", [16, 32])
def test_published_trees_are_read_about_once(
    nodes: list[int], tokens: list[int], block: int
) -> None:
    shape = tree_of(nodes, tokens, block)
    assert shape.tokens_once() == sum(np.multiply(nodes, tokens)) + nodes[-1]
    for levels, bound in ((1000, 1.02), (3, 1.12)):
        choice = choose(shape, reads(), levels)
        check_forest(choice.forest)
        assert len(choice.forest.levels) <= levels
        assert choice.relay <= bound * shape.tokens_once()


def test_a_path_of_more_nodes_than_are_searched_loses_little() -> None:
    rows = 200
    table = np.arange(rows * rows, dtype=np.int32).reshape(rows, rows) + rows + 1
    for row in range(rows):  # each row shares one block more than the last
        table[row, : row + 1] = np.arange(1, row + 2)
    lens = np.full(rows, rows * BLOCK_SIZE + 1, dtype=np.int32)
    shape = StepShape(
        build_trie(table, lens - np.int32(1), BLOCK_SIZE), BLOCK_SIZE, lens, np.ones_like(lens)
    )
    choice = choose(shape, reads(), 1000)
    check_forest(choice.forest)
    assert choice.relay < 1.1 * shape.tokens_once()


def test_a_request_that_loses_by_joining_stays_out_of_the_group() -> None:
    # Arithmetic of system attention costs what 64 queries never save in reads.
    read = KernelCosts(read=1.0)
    costs = Costs(stock=read, context=read, system=KernelCosts(first=1.0, pair=0.25))
    rows: list[Row] = [([1, 2, 3, 4], 4 * BLOCK_SIZE + n, n) for n in (1, 64, 1)]
    assert groups_of(choose(step(rows), costs, 1)) == [[(0, 4, [0, 2])]]


def test_a_level_is_used_where_it_pays_and_not_elsewhere() -> None:
    read = KernelCosts(read=1.0)
    # A second level saves 64 reads for two rows; one more partial costs 1 per query token.
    costs = Costs(stock=read, context=read, system=KernelCosts(first=1.0), fusion=1.0)
    rows: list[Row] = []
    for first, queries in ((100, 1), (200, 40)):
        for pair in range(2):
            deeper = [first + 10 * (pair + 1) + i for i in range(4)]
            rows += [([first, first + 1, *deeper], 6 * BLOCK_SIZE + queries, queries)] * 2
    choice = choose(step(rows), costs, 2)
    inner = [group.rows.tolist() for group in choice.forest.levels[1]]
    assert inner == [[0, 1], [2, 3]]
    assert choice.relay == pytest.approx(best_time(rows, BLOCK_SIZE, costs, 2))


def test_groups_have_to_gain_more_than_the_margin() -> None:
    rng = random.Random(5)
    found = 0
    for _ in range(50):
        shape, costs = step(random_rows(rng, 8)), random_costs(rng)
        choice = choose(shape, costs, 3)
        alone = predict(Forest((), len(shape.seq_lens), BLOCK_SIZE), shape, costs)
        gain = alone / choice.relay - 1
        if choice.forest.levels and gain > 0.01:
            found += 1
            kept = choose(shape, replace(costs, margin=0.99 * gain), 3)
            assert kept.forest.levels and kept.relay == choice.relay
            left = choose(shape, replace(costs, margin=1.01 * gain), 3)
            assert not left.forest.levels and left.relay == alone
    assert found > 10
