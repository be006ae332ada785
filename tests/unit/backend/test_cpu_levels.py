"""Several levels, and rows with several query tokens, on the engine's own kernels."""

import random

import numpy as np
import pytest
import torch

from tests.unit.backend.cpu_bench import (
    BLOCK,
    Bench,
    assert_as_good,
    make_bench,
    make_step,
    outputs,
    write,
)
from vllm_relay.backend import cpu, cpu_impl
from vllm_relay.sharing import Costs, KernelCosts, planner

BLOCKS = 120


def tree(rng: random.Random, depth: int) -> list[list[int]]:
    """Block tables of leaves below a random tree; every node has its own blocks."""
    names = iter(range(1, BLOCKS))
    tables: list[list[int]] = []

    def grow(above: list[int], levels: int) -> None:
        if levels == 0:
            tables.append([*above, next(names)])
            return
        mine = [*above, *(next(names) for _ in range(rng.randint(1, 2)))]
        for _ in range(rng.randint(2, 3)):
            grow(mine, levels - 1)

    grow([], depth)
    tables += [[next(names)], [next(names), next(names)]]  # rows that share nothing
    rng.shuffle(tables)
    return tables


def groups_of(bench: Bench, step: object) -> list[list[tuple[int, int]]] | None:
    """Per level the query tokens of each group, in plan order; None for vLLM's own attention."""
    metadata = bench.builder.build(0, step)
    if not isinstance(metadata, cpu_impl.RelayMetadata):
        return None
    (relay,) = metadata.relay.values()
    return [
        [
            (begin, end)
            for begin, end, tokens in zip(
                level.query_start_loc[:-1].tolist(),
                level.query_start_loc[1:].tolist(),
                level.seq_lens.tolist(),
                strict=True,
            )
            if tokens
        ]
        for level in relay.attention.plan.levels
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_levels_and_query_lengths_from_one_to_eight(depth: int, dtype: torch.dtype) -> None:
    for seed in range(4):
        rng = random.Random(10 * depth + seed)
        bench = make_bench(6, 3, 64, dtype, "vec", BLOCKS)
        tables = tree(rng, depth)
        queries = [rng.randint(1, 8) for _ in tables]
        lens = [
            (len(table) - 1) * BLOCK + rng.randint(count, BLOCK)
            for table, count in zip(tables, queries, strict=True)
        ]
        step = make_step(tables, lens, queries)
        query = torch.randn(sum(queries), 6, 64).to(dtype)
        assert_as_good(*outputs(bench, step, query), dtype)
        assert len(groups_of(bench, step) or []) == depth


def test_decodes_of_a_mixed_step_are_relayed_beside_prefills() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS)
    prefix = [1, 2, 3]
    tables = [[*prefix, 10], [20, 21, 22, 23], [*prefix, 11], [*prefix, 30, 31], [*prefix, 12]]
    # decode, a prefill from its first token on, decode, a prefill behind the prefix, a draft
    lens, queries = [100, 128, 120, 160, 110], [1, 128, 1, 64, 5]
    step = make_step(tables, lens, queries)
    query = torch.randn(sum(queries), 4, 64).bfloat16()
    assert_as_good(*outputs(bench, step, query), torch.bfloat16)
    assert groups_of(bench, step) == [[(0, 1 + 1 + 64 + 5)]]


def test_a_context_that_vanishes_still_weighs_at_every_query_of_a_request() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS)
    bench.values[10 * BLOCK : 11 * BLOCK, 1] = 0
    write(bench)
    step = make_step([[1, 2, 10], [1, 2, 11], [1, 2, 12]], [80, 90, 70], [6, 3, 1])
    query = torch.randn(10, 4, 64).bfloat16()
    assert_as_good(*outputs(bench, step, query), torch.bfloat16)


def timed(**costs: float) -> Costs:
    """Costs in which reading a KV token takes a second."""
    kernel = KernelCosts(read=1.0)
    return Costs(stock=kernel, context=kernel, system=KernelCosts(first=1.0), **costs)


def test_a_group_that_is_predicted_not_to_pay_is_not_made() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS)
    step = make_step([[1, 2, 10], [1, 2, 11], [1, 2, 12]], [70, 80, 90])
    bench.plan_by(timed(step=129.0))
    assert type(bench.builder.build(0, step)) is cpu.CPUAttentionMetadata
    bench.plan_by(timed(step=127.0))
    assert groups_of(bench, step) == [[(0, 3)]]


def test_the_policy_is_asked_once_for_steps_that_did_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS)
    tables = [[1, 2, 3, 10], [1, 2, 3, 11], [1, 2, 12]]
    asked = []
    choose = planner.choose
    monkeypatch.setattr(planner, "choose", lambda *args: asked.append(args) or choose(*args))
    for extra in range(5):  # decodes: only contexts grow
        step = make_step(tables, [100 + extra, 110 + extra, 70 + extra])
        query = torch.randn(3, 4, 64).bfloat16()
        assert_as_good(*outputs(bench, step, query), torch.bfloat16)
    assert len(asked) == 1
    tables[2] = [1, 2, 3, 13]
    assert groups_of(bench, make_step(tables, [100, 110, 120])) == [[(0, 3)]]
    assert len(asked) == 2 and np.array_equal(asked[1][0].seq_lens, [100, 110, 120])
