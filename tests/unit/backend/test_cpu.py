"""Builder and implementation on the engine's own kernels and cache layouts, without an engine."""

from unittest import mock

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
from vllm_relay.backend import cpu, cpu_impl
from vllm_relay.backend.packed_cache import SegmentCopies
from vllm_relay.ops.native import library as native

# Rows 0, 3, 5 and 6 share three blocks, 1 and 4 two others, 2 and 7 nothing.
TABLES = [[1, 2, 3, 10], [5, 6, 11, 12], [13, 14], [1, 2, 3, 15], [5, 6, 16], [1, 2, 3, 17, 18]]
TABLES += [[1, 2, 3, 19], [20]]
LENS = [97, 128, 40, 120, 65, 160, 128, 1]

# The last two have more query heads per KV head than AMX takes twice.
SHAPES = [(4, 4, 64), (8, 2, 96), (8, 1, 128), (3, 3, 32), (6, 2, 256), (18, 2, 64), (32, 2, 128)]
KINDS = [(torch.bfloat16, "vec"), (torch.float32, "vec"), (torch.float16, "vec")]
KINDS += [(torch.bfloat16, "vec16"), (torch.float32, "vec16"), (torch.bfloat16, "amx")]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_groups_and_loners_are_as_exact_as_vllms_own_path(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, isa: str, kernels: str
) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    if dtype == torch.float16 and kernels == "torch":
        pytest.skip("vLLM's kernel does not tell an LSE in float16")
    bench = make_bench(heads, kv_heads, dim, dtype, isa, 21, kernels)
    query = torch.randn(len(LENS), heads, dim).to(dtype)
    assert_as_good(*outputs(bench, make_step(TABLES, LENS), query), dtype)
    together = [0, 3, 5, 6]  # one group in batch order: nothing is gathered
    common = make_step([TABLES[i] for i in together], [LENS[i] for i in together])
    assert_as_good(*outputs(bench, common, query[together].clone()), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_context_whose_values_vanish_still_weighs(dtype: torch.dtype) -> None:
    bench = make_bench(4, 2, 64, dtype, "vec", 21, "torch")
    bench.values[10 * BLOCK : 11 * BLOCK, 1] = 0  # row 0's context, one KV head
    write(bench)
    query = torch.randn(len(LENS), 4, 64).to(dtype)
    common = make_step(TABLES, LENS)
    exact_lse = cpu_impl.RelayImpl._exact_context_lse
    with mock.patch.object(cpu_impl.RelayImpl, "_exact_context_lse", autospec=True) as asked:
        asked.side_effect = exact_lse
        assert_as_good(*outputs(bench, common, query), dtype)
    assert asked.called


def test_a_head_whose_values_are_all_zero_gives_zeros_without_a_detour() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", 21, "torch")
    bench.values[:, 1] = 0
    write(bench)
    query = torch.randn(len(LENS), 4, 64).bfloat16()
    with mock.patch.object(cpu_impl.RelayImpl, "_exact_context_lse") as asked:
        relay, stock, exact = outputs(bench, make_step(TABLES, LENS), query)
    assert not asked.called and (relay[:, 2:] == 0).all()
    assert_as_good(relay, stock, exact, torch.bfloat16)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_reused_block_is_read_anew(kernels: str) -> None:
    dtype = torch.bfloat16
    bench = make_bench(4, 2, 64, dtype, "vec", 21, kernels)
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
    assert not isinstance(bench.builder.build(0, prefill), cpu_impl.RelayMetadata)
    bench.keys[BLOCK : 4 * BLOCK] = torch.randn(3 * BLOCK, 2, 64).to(dtype)
    write(bench)
    assert_as_good(*outputs(bench, common, query), dtype)


def test_steps_that_the_split_does_not_cover_carry_vllms_own_metadata() -> None:
    bench = make_bench(4, 2, 64, torch.bfloat16, "vec", blocks=21)
    decode = make_step(TABLES, LENS)
    one = make_step(TABLES[:1], LENS[:1])
    for common in (decode.replace(causal=False), one):
        assert type(bench.builder.build(0, common)) is cpu.CPUAttentionMetadata


def test_a_segment_over_the_memory_bound_is_cut_to_it_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16
    bench = make_bench(4, 2, 64, dtype, "vec", 21, "torch")
    bench.builder._copies = SegmentCopies(bytes_per_block=1, max_bytes=2)
    monkeypatch.setattr(metrics, "_said", set())
    monkeypatch.setattr(metrics.logger, "propagate", True)
    with caplog.at_level("WARNING", logger="vllm.relay"):
        metadata = [bench.builder.build(0, make_step(TABLES, LENS)) for _ in range(2)][1]
    # the first group has three blocks, the second two; only two fit in all
    assert [group.blocks for level in metadata.relay.levels for group in level] == [slice(0, 2)]
    query = torch.randn(len(LENS), 4, 64).to(dtype)
    assert_as_good(*outputs(bench, make_step(TABLES, LENS), query), dtype)
    assert len([r for r in caplog.records if "max_copy_gib" in r.getMessage()]) == 1


def test_float16_is_left_to_vllm_without_our_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(4, 2, 64, torch.float16, "vec", blocks=2)
    monkeypatch.setattr(native, "library", lambda: "no compiler")
    bench.impl.prepare(bench.layer, BLOCK, torch.float16)
    assert bench.impl.refusal == "float16"
