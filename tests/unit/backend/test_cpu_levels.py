"""Several levels, and rows with several query tokens, on the engine's own kernels."""

import random
from pathlib import Path

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
)
from vllm_relay import metrics
from vllm_relay.backend import cpu, cpu_impl
from vllm_relay.backend.packed_cache import SegmentCopies
from vllm_relay.config import RelayConfig
from vllm_relay.sharing import Costs, KernelCosts, Planner, reads

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


def levels_of(metadata: cpu_impl.RelayMetadata) -> int:
    assert metadata.relay is not None
    return len(metadata.relay.levels)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_levels_and_query_lengths_from_one_to_eight(
    depth: int, seed: int, dtype: torch.dtype, kernels: str
) -> None:
    rng = random.Random(10 * depth + seed)
    bench = make_bench(6, 3, 64, dtype, "vec", BLOCKS, kernels)
    tables = tree(rng, depth)
    queries = [rng.randint(1, 8) for _ in tables]
    lens = [
        (len(table) - 1) * BLOCK + rng.randint(count, BLOCK)
        for table, count in zip(tables, queries, strict=True)
    ]
    step = make_step(tables, lens, queries)
    query = torch.randn(sum(queries), 6, 64).to(dtype)
    assert_as_good(*outputs(bench, step, query), dtype)
    assert levels_of(bench.builder.build(0, step)) == depth


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_decodes_of_a_mixed_step_are_relayed_beside_prefills(kernels: str) -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS, kernels)
    prefix = [1, 2, 3]
    tables = [[*prefix, 10], [20, 21, 22, 23], [*prefix, 11], [*prefix, 30, 31], [*prefix, 12]]
    # decode, a prefill from its first token on, decode, a prefill behind the prefix, a draft
    lens, queries = [100, 128, 120, 160, 110], [1, 128, 1, 64, 5]
    step = make_step(tables, lens, queries)
    query = torch.randn(sum(queries), 4, 64).bfloat16()
    assert_as_good(*outputs(bench, step, query), torch.bfloat16)
    metadata = bench.builder.build(0, step)
    assert [(g.begin, g.end) for g in metadata.relay.levels[0]] == [(0, 1 + 1 + 64 + 5)]
    if kernels == "torch":
        assert metadata.relay.context.num_actual_tokens == 1 + 1 + 64 + 5
        assert metadata.relay.rest.num_actual_tokens == 128


def test_a_context_that_vanishes_still_weighs_at_every_query_of_a_row() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS)
    bench.values[10 * BLOCK : 11 * BLOCK, 1] = 0
    bench.impl.do_kv_cache_update(
        bench.layer, bench.keys, bench.values, bench.cache, torch.arange(BLOCKS * BLOCK)
    )
    step = make_step([[1, 2, 10], [1, 2, 11], [1, 2, 12]], [80, 90, 70], [6, 3, 1])
    query = torch.randn(10, 4, 64).bfloat16()
    assert_as_good(*outputs(bench, step, query), torch.bfloat16)


def timed(bench: Bench, **costs: float) -> Planner:
    """Plan by costs in which reading a KV token takes a second."""
    kernel = KernelCosts(read=1.0)
    bench.builder._costs = Costs(kernel, kernel, KernelCosts(first=1.0), **costs)
    bench.builder._planner = Planner(BLOCK, bench.builder._costs, 3)
    return bench.builder._planner


def relayed(bench: Bench, step: object) -> list[list[tuple[int, int]]] | None:
    metadata = bench.builder.build(0, step)
    if not isinstance(metadata, cpu_impl.RelayMetadata):
        return None
    assert metadata.relay is not None
    return [[(g.begin, g.end) for g in level] for level in metadata.relay.levels]


def test_a_segment_is_copied_once_steps_have_forgone_what_the_copy_costs() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS, "torch")
    tables, lens = [[1, 2, 10], [1, 2, 11], [1, 2, 12]], [70, 80, 90]
    # a step saves 2 * 64 reads, the copy costs 64 * 5: two steps are not enough
    timed(bench, copy=5.0)
    step = make_step(tables, lens)
    assert [relayed(bench, step) for _ in range(4)] == [None, None, [[(0, 3)]], [[(0, 3)]]]
    # A longer segment: what is copied is used while the rest is not yet paid for.
    longer = make_step([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 12]], [130, 140, 90])
    assert relayed(bench, longer) == [[(0, 3)]]


def test_a_group_that_is_predicted_not_to_pay_is_not_made() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS)
    step = make_step([[1, 2, 10], [1, 2, 11], [1, 2, 12]], [70, 80, 90])
    timed(bench, step=129.0)
    assert type(bench.builder.build(0, step)) is cpu.CPUAttentionMetadata
    timed(bench, step=127.0)
    assert relayed(bench, step) == [[(0, 3)]]


def test_the_planner_is_asked_once_for_steps_that_did_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS)
    tables = [[1, 2, 3, 10], [1, 2, 3, 11], [1, 2, 12]]
    searches = []
    from vllm_relay.sharing import search as module

    search = module.choose
    monkeypatch.setattr(module, "choose", lambda *args: searches.append(args) or search(*args))
    for extra in range(5):  # decodes: only contexts grow
        step = make_step(tables, [100 + extra, 110 + extra, 70 + extra])
        query = torch.randn(3, 4, 64).bfloat16()
        assert_as_good(*outputs(bench, step, query), torch.bfloat16)
    assert len(searches) == 1
    tables[2] = [1, 2, 3, 13]
    assert relayed(bench, make_step(tables, [100, 110, 120])) == [[(0, 3)]]
    assert len(searches) == 2 and np.array_equal(searches[1][0].seq_lens, [100, 110, 120])


def test_a_group_that_is_cut_is_predicted_anew() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS, "torch")
    tables = [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11], [1, 2, 3, 4, 12]]
    step = make_step(tables, [130, 140, 150])
    # Whole it saves 2 * 128 reads, cut to one block 2 * 32; a relayed step costs 100.
    for room, expected in ((4, [[(0, 3)]]), (2, [[(0, 3)]]), (1, None)):
        timed(bench, step=100.0)
        bench.builder._copies = SegmentCopies(1, room)
        assert relayed(bench, step) == expected, room


def test_what_a_copied_group_saves_does_not_pay_for_others() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS, "torch")
    prompt, document = [1, 2, 3, 4], [5]
    tables = [[*prompt, 10 + i] for i in range(6)]
    lens = [132] * 6
    timed(bench, copy=2.0)
    assert [relayed(bench, make_step(tables, lens)) for _ in range(2)][-1] == [[(0, 6)]]
    # Two of them now share a document: it saves 32 reads per step, and its copy costs 64.
    tables[:2] = [[*prompt, *document, 20], [*prompt, *document, 21]]
    lens[:2] = [164, 164]
    seen = [len(relayed(bench, make_step(tables, lens)) or []) for _ in range(3)]
    assert seen == [1, 2, 2]


class Impl:
    num_heads, num_kv_heads, head_size, refusal = 16, 16, 128, None


@pytest.mark.parametrize("text", [None, "[]", "{"])
def test_costs_come_from_a_file_and_a_bad_one_is_named(
    text: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "devices.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("VLLM_RELAY_DEVICES", str(path))
    monkeypatch.setattr(metrics, "_said", set())
    monkeypatch.setattr(metrics.logger, "propagate", True)
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", BLOCKS)
    bench.builder._config = RelayConfig()
    with caplog.at_level("WARNING", logger="vllm.relay"):
        costs = bench.builder._find_costs([Impl()])
    assert costs.stock.first > 0 and costs.system.pair > 0
    said = [record.getMessage() for record in caplog.records]
    assert any(str(path) in line for line in said) == (text == "{")
    # by another machine than those of the package, a guess: said, with how to measure
    bench.builder.isa = "no such instructions"
    with caplog.at_level("WARNING", logger="vllm.relay"):
        wider = bench.builder._find_costs([Impl()])
    assert any("was not measured" in r.getMessage() for r in caplog.records)
    assert wider.context.pair >= costs.context.pair
    bench.builder._config = RelayConfig(min_saved_tokens=7)
    assert bench.builder._find_costs([Impl()]) == reads(7)
