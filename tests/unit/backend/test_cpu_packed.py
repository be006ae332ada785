"""Packed segments on the engine's own cache and layouts: when, where from, and never stale."""

from typing import Any

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
from tests.unit.backend.test_cpu import LENS, TABLES
from vllm_relay.ops.native import library as native
from vllm_relay.sharing import Costs, KernelCosts

HEADS, KV_HEADS, DIM = 4, 2, 64


def bench_of(dtype: torch.dtype = torch.bfloat16) -> Bench:
    return make_bench(HEADS, KV_HEADS, DIM, dtype, "vec", 21)


def packed(bench: Bench, step: Any) -> list[bool]:
    """Per group of a step, whether it reads a packed segment."""
    (relay,) = bench.builder.build(0, step).relay.values()
    levels = [relay.attention.call.sequences[:, native.LAYOUT]]
    context = len(relay.attention.plan.context.seq_lens)
    return [layout > 0 for layout in levels[0][:-context].tolist()]


def timed(**costs: Any) -> Costs:
    kernel = KernelCosts(read=1.0)
    return Costs(stock=kernel, context=kernel, system=KernelCosts(first=1.0), **costs)


def test_a_segment_is_packed_once_the_regret_has_reached_its_price() -> None:
    bench, step = bench_of(), make_step([[1, 2, 10], [1, 2, 11], [1, 2, 12]], [70, 80, 90])
    # A step would gain 64 * 0.5, packing costs 64 * 1.2.
    bench.plan_by(timed(copy=1.2, packed=KernelCosts(first=0.5)))
    assert [packed(bench, step) for _ in range(4)] == [[False], [False], [True], [True]]
    # Where it gains nothing it is never done.
    bench.plan_by(timed(copy=1.2, packed=KernelCosts(first=1.0)))
    assert [packed(bench, step) for _ in range(100)] == [[False]] * 100


def test_groups_have_the_speed_of_packed_segments_where_there_is_room_for_some() -> None:
    bench, step = bench_of(), make_step([[1, 2, 10], [1, 2, 11], [1, 2, 12]], [70, 80, 90])
    kernel = KernelCosts(read=1.0)
    costs = Costs(
        stock=kernel,
        context=kernel,
        system=KernelCosts(first=1.0, pair=0.8),  # 3 requests read 3 times, or 3.4 times that
        packed=KernelCosts(first=1.0, pair=0.1),
    )
    bench.plan_by(costs)
    assert packed(bench, step) == [True]
    bench.plan_by(costs, room=0)
    assert not hasattr(bench.builder.build(0, step), "relay")


def test_a_step_packs_one_segment() -> None:
    bench, step = bench_of(), make_step(TABLES, LENS)
    bench.plan_by(timed(copy=1e-9, packed=KernelCosts(first=0.5)))
    first, second, third = (packed(bench, step) for _ in range(3))
    assert sum(first) == 1 and sum(second) == sum(third) == 2 == len(first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_packed_segments_and_blocks_in_place_give_the_same_numbers(dtype: torch.dtype) -> None:
    bench, step = bench_of(dtype), make_step(TABLES, LENS)
    query = torch.randn(len(LENS), HEADS, DIM).to(dtype)
    assert packed(bench, step) == [True, True]
    relay, stock, exact = outputs(bench, step, query)
    assert_as_good(relay, stock, exact, dtype)
    bench.plan_by(room=0)
    assert packed(bench, step) == [False, False]
    in_place, _, _ = outputs(bench, step, query)
    assert_as_good(in_place, stock, exact, dtype)
    bench.plan_by(room=3)  # for the first of them, of three blocks
    assert packed(bench, step) == [True, False]
    mixed, _, _ = outputs(bench, step, query)
    # The requests of either group are as they were, bit for bit.
    assert torch.equal(mixed[[0, 3, 5, 6]], relay[[0, 3, 5, 6]])
    assert torch.equal(mixed[[1, 4]], in_place[[1, 4]])


def test_a_system_kv_is_packed_when_it_is_loaded_and_as_long_as_it_is_pinned() -> None:
    bench, step = bench_of(), make_step([[1, 2, 3, 10], [1, 2, 3, 11]], [100, 110])
    other = make_step([[4, 5, 12], [4, 5, 13]], [70, 80])
    # Never worth it otherwise.
    segments = bench.plan_by(timed(copy=1e9, packed=KernelCosts(first=0.5)), room=3)
    bench.impl.keep(bench.layer, bench.cache, [1, 2, 3])
    bench.impl.keep(bench.layer, bench.cache, [1, 2, 6, 7])  # no room: read in place
    assert [(len(s.block_ids), len(s._layers)) for s in segments] == [(3, 1)]
    assert [packed(bench, s) for s in (step, other, step)] == [[True], [False], [True]]
    query = torch.randn(2, HEADS, DIM).bfloat16()
    assert_as_good(*outputs(bench, step, query), torch.bfloat16)
    bench.impl.keep(bench.layer, bench.cache, [1, 2])  # in the first
    assert [len(s.block_ids) for s in segments] == [3]
    bench.impl.forget()
    assert [packed(bench, s) for s in (step, other, step)] == [[True], [False], [False]]


def test_a_segment_without_room_evicts_nothing() -> None:
    bench = bench_of()
    segments = bench.plan_by(room=3)
    assert packed(bench, make_step([[1, 2, 10], [1, 2, 11]], [70, 80])) == [True]
    (kept,) = segments
    # Request 2 still vouches for the first, which no group of this step uses.
    tables = [[3, 4, 5, 6, 12], [3, 4, 5, 6, 13], [1, 2, 10]]
    assert packed(bench, make_step(tables, [140, 150, 70])) == [False]
    assert list(segments) == [kept]


def test_a_segment_inside_a_longer_packed_one_is_read_there() -> None:
    bench = bench_of()
    tables = [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11], [1, 2, 12]]
    query = torch.randn(3, HEADS, DIM).bfloat16()
    for lens in ([140, 150, 70], [141, 151, 71]):
        assert_as_good(*outputs(bench, make_step(tables, lens), query), torch.bfloat16)
    assert packed(bench, make_step(tables, [142, 152, 72])) == [True, True]


def test_a_packed_segment_that_a_step_writes_to_is_packed_anew() -> None:
    bench, step = bench_of(), make_step(TABLES, LENS)
    query = torch.randn(len(LENS), HEADS, DIM).bfloat16()
    before = outputs(bench, step, query)[0]
    slots = torch.arange(BLOCK, 4 * BLOCK)
    bench.builder.build(0, step.replace(num_actual_tokens=len(slots), slot_mapping=slots))
    bench.keys[slots] = torch.randn(len(slots), KV_HEADS, DIM).bfloat16()
    write(bench)
    relay, stock, exact = outputs(bench, step, query)
    assert_as_good(relay, stock, exact, torch.bfloat16)
    with pytest.raises(AssertionError):
        assert_as_good(before, stock, exact, torch.bfloat16)


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's AVX2 build writes no blocks for AMX"
)
@pytest.mark.parametrize("head_size", [32, 64, 96, 128])
def test_blocks_laid_out_for_amx_are_read_in_place(head_size: int) -> None:
    """Their writer runs without AMX; vLLM's attention on them does not, and is taken from "vec"."""
    dtype = torch.bfloat16
    vec, amx = (make_bench(6, 2, head_size, dtype, isa, 21) for isa in ("vec", "amx"))
    assert torch.equal(vec.keys, amx.keys) and not torch.equal(vec.cache, amx.cache)
    step = make_step(TABLES, LENS)
    query = torch.randn(len(LENS), 6, head_size).to(dtype)
    _, stock, exact = outputs(vec, step, query)
    for room in (0, 10**6):
        # Built by the builder for "vec": vLLM's own refuses to schedule for AMX without it.
        vec.plan_by(room=room)
        metadata = vec.builder.build(0, step)
        out = torch.full_like(query, torch.nan)
        amx.impl.forward_relayed(amx.layer, query, query, query, amx.cache, metadata, out)
        assert_as_good(out.double(), stock, exact, dtype)
