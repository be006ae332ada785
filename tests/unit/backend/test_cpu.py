"""Builder and implementation on the engine's own kernels and cache layouts, without an engine."""

import pytest
import torch

from tests.unit.backend.cpu_bench import (
    BLOCK,
    assert_as_good,
    make_bench,
    make_step,
    outputs,
    write,
)
from vllm_relay import metrics
from vllm_relay.backend import cpu
from vllm_relay.ops.native import library as native
from vllm_relay.sharing import Costs, KernelCosts

# Requests 0, 3, 5 and 6 share three blocks, 1 and 4 two others, 2 and 7 nothing.
TABLES = [[1, 2, 3, 10], [5, 6, 11, 12], [13, 14], [1, 2, 3, 15], [5, 6, 16], [1, 2, 3, 17, 18]]
TABLES += [[1, 2, 3, 19], [20]]
LENS = [97, 128, 40, 120, 65, 160, 128, 1]

SHAPES = [(4, 4, 64), (8, 2, 96), (8, 1, 128), (3, 3, 32), (6, 2, 256), (18, 2, 64), (32, 2, 128)]
KINDS = [(torch.bfloat16, "vec"), (torch.float32, "vec"), (torch.float16, "vec")]
KINDS += [(torch.bfloat16, "vec16"), (torch.float32, "vec16"), (torch.bfloat16, "amx")]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
def test_grouped_and_ungrouped_requests_are_as_exact_as_vllms_own_path(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, isa: str
) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    bench = make_bench(heads, kv_heads, dim, dtype, isa, 21)
    query = torch.randn(len(LENS), heads, dim).to(dtype)
    assert_as_good(*outputs(bench, make_step(TABLES, LENS), query), dtype)
    together = [0, 3, 5, 6]  # one group in batch order: nothing is gathered
    common = make_step([TABLES[i] for i in together], [LENS[i] for i in together])
    assert_as_good(*outputs(bench, common, query[together].clone()), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_context_whose_values_vanish_still_weighs(dtype: torch.dtype) -> None:
    bench = make_bench(4, 2, 64, dtype, "vec", 21)
    bench.values[10 * BLOCK : 11 * BLOCK, 1] = 0  # request 0's context, one KV head
    write(bench)
    query = torch.randn(len(LENS), 4, 64).to(dtype)
    assert_as_good(*outputs(bench, make_step(TABLES, LENS), query), dtype)


def test_a_head_whose_values_are_all_zero_gives_zeros() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", 21)
    bench.values[:, 1] = 0
    write(bench)
    query = torch.randn(len(LENS), 4, 64).bfloat16()
    relay, stock, exact = outputs(bench, make_step(TABLES, LENS), query)
    assert (relay[:, 2:] == 0).all()
    assert_as_good(relay, stock, exact, torch.bfloat16)


def test_a_reused_block_is_read_anew() -> None:
    dtype = torch.bfloat16
    bench = make_bench(4, 2, 64, dtype, "vec", 21)
    common = make_step(TABLES, LENS)
    query = torch.randn(len(LENS), 4, 64).to(dtype)
    assert_as_good(*outputs(bench, common, query), dtype)
    # The blocks of the first group are freed and given to requests with other tokens: a prefill
    # step that writes them, then a decode step with the very same block table.
    prefill = common.replace(
        max_query_len=96,
        num_actual_tokens=96,
        query_start_loc=torch.tensor([0, *[96] * 8], dtype=torch.int32),
        slot_mapping=torch.arange(BLOCK, 4 * BLOCK),
    )
    bench.builder.build(0, prefill)
    bench.keys[BLOCK : 4 * BLOCK] = torch.randn(3 * BLOCK, 2, 64).to(dtype)
    write(bench)
    assert_as_good(*outputs(bench, common, query), dtype)


def test_steps_that_relay_does_not_cover_carry_vllms_own_metadata() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", blocks=21)
    decode = make_step(TABLES, LENS)
    assert type(bench.builder.build(0, decode.replace(causal=False))) is cpu.CPUAttentionMetadata
    # Where vLLM's own attention is predicted to be faster.
    kernel = KernelCosts(read=1.0)
    bench.plan_by(Costs(stock=kernel, context=kernel.times(2), system=KernelCosts(call=1e9)))
    assert type(bench.builder.build(0, decode)) is cpu.CPUAttentionMetadata


def test_without_kernels_every_step_is_vllms_own_and_the_log_says_so_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: "no compiler")
    monkeypatch.setattr(metrics, "_said", set())
    monkeypatch.setattr(metrics.logger, "propagate", True)
    with caplog.at_level("WARNING", logger="vllm.relay"):
        bench = make_bench(4, 2, 64, torch.bfloat16, "vec", blocks=21)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no compiler" in line and "vLLM's own CPU attention serves these layers" in line
    assert type(bench.builder.build(0, make_step(TABLES, LENS))) is cpu.CPUAttentionMetadata
