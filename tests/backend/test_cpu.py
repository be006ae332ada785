"""Builder and implementation on the engine's own kernels and cache layouts, without an engine.

Error against fp64 is at most twice that of vLLM's own path on the same inputs.
"""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn

from vllm_relay import metrics
from vllm_relay.backend import cpu
from vllm_relay.backend.copies import SegmentCopies
from vllm_relay.config import RelayConfig
from vllm_relay.ops import reference

BLOCK = 32


@dataclass
class Bench:
    """A layer, its builder and a KV cache filled with tokens through the backend's own update."""

    builder: cpu.RelayMetadataBuilder
    impl: cpu.RelayImpl
    layer: Any
    cache: torch.Tensor
    keys: torch.Tensor  # [blocks * BLOCK, Hkv, D] by slot
    values: torch.Tensor


def _bench(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, isa: str, blocks: int) -> Bench:
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(block_size=BLOCK),  # read by 0.27
    )
    with (
        mock.patch.object(cpu_attn, "get_current_vllm_config", lambda: config),
        mock.patch.object(cpu_attn, "_get_attn_isa", lambda *args: isa),
    ):
        impl = cpu.RelayImpl(heads, dim, dim**-0.5, kv_heads, None, None, "auto")
    impl.isa = isa
    layer = SimpleNamespace(isa=isa, layer_name="layer", _k_scale_float=1.0, _v_scale_float=1.0)
    impl.prepare(layer, BLOCK, dtype)
    assert impl.refusal is None

    builder = object.__new__(cpu.RelayMetadataBuilder)
    vars(builder).update(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        window_size=-1,
        block_size=4 * BLOCK,  # not what block tables are made of, as in vLLM 0.27
        kv_cache_dtype="auto",
        isa=isa,
        is_cross_attention=False,
        is_encoder_only_attention=False,
        _block=BLOCK,
        _config=RelayConfig(min_saved_tokens=0),
        _bytes_per_token=1,
        _copies=SegmentCopies(1, 10**6),
        _active=True,
    )
    builder._twice_the_heads = copy.copy(builder)
    builder._twice_the_heads.num_heads = 2 * heads

    g = torch.Generator().manual_seed(heads + dim)
    keys, values = (
        torch.randn(blocks * BLOCK, kv_heads, dim, generator=g).to(dtype) for _ in range(2)
    )
    keys *= 1.5
    cache = torch.zeros(blocks, kv_heads, BLOCK, 2 * dim, dtype=dtype)
    bench = Bench(builder, impl, layer, cache, keys, values)
    _write(bench)
    return bench


def _write(bench: Bench) -> None:
    slots = torch.arange(len(bench.keys))
    bench.impl.do_kv_cache_update(bench.layer, bench.keys, bench.values, bench.cache, slots)


def _common(tables: list[list[int]], lens: list[int]) -> CommonAttentionMetadata:
    rows, width = len(tables), max(map(len, tables)) + 2
    table = torch.full((rows, width), 7, dtype=torch.int32)  # stale ids beyond a row's blocks
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = torch.tensor(blocks)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    last = torch.tensor(lens) - 1
    slots = table.long().gather(1, (last // BLOCK)[:, None])[:, 0] * BLOCK + last % BLOCK
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=rows,
        num_actual_tokens=rows,
        max_query_len=1,
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=slots,
    )


def _outputs(
    bench: Bench, common: CommonAttentionMetadata, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output of relay, of vLLM's own path, and of the oracle, each ``[R, Hq, D]`` fp64."""

    def forward(metadata: Any) -> torch.Tensor:
        out = torch.full_like(query, torch.nan)
        bench.impl.forward(bench.layer, query, query, query, bench.cache, metadata, out)
        return out.double()

    metadata = bench.builder.build(0, common)
    assert isinstance(metadata, cpu.RelayMetadata)
    stock = cpu.CPUAttentionMetadataBuilder.build(bench.builder, 0, common)
    exact = []
    for row in range(common.num_reqs):
        length = int(common.seq_lens[row])
        position = torch.arange(length)
        blocks = common.block_table_tensor[row].long()
        slots = blocks[position // BLOCK] * BLOCK + position % BLOCK
        k, v = bench.keys[slots], bench.values[slots]
        exact.append(reference.attention_lse(query[row : row + 1], k, v)[0])
    return forward(metadata), forward(stock), torch.cat(exact).double()


def _assert_as_good(
    relay: torch.Tensor, stock: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> None:
    bound, error = (stock - exact).abs(), (relay - exact).abs()
    # Below the resolution of fp32 the two differ by summation order alone.
    floor = 1e-5 * exact.abs().max()
    assert error.square().mean().sqrt() <= 2 * bound.square().mean().sqrt() + floor
    # The largest error may hold one more rounding: partials are stored in the query's dtype.
    rounding = torch.finfo(dtype).eps / 2 * exact.abs().max()
    assert error.max() <= 2 * bound.max() + rounding + floor


# Rows 0, 3, 5 and 6 share three blocks, 1 and 4 two others, 2 and 7 nothing.
TABLES = [[1, 2, 3, 10], [5, 6, 11, 12], [13, 14], [1, 2, 3, 15], [5, 6, 16], [1, 2, 3, 17, 18]]
TABLES += [[1, 2, 3, 19], [20]]
LENS = [97, 128, 40, 120, 65, 160, 128, 1]

# The last two have more query heads per KV head than AMX takes twice.
SHAPES = [(4, 4, 64), (8, 2, 96), (8, 1, 128), (3, 3, 32), (6, 2, 256), (18, 2, 64), (32, 2, 128)]
KINDS = [(torch.bfloat16, "vec"), (torch.float32, "vec")]
KINDS += [(torch.bfloat16, "vec16"), (torch.float32, "vec16"), (torch.bfloat16, "amx")]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
def test_groups_and_loners_are_as_exact_as_vllms_own_path(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, isa: str
) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    bench = _bench(heads, kv_heads, dim, dtype, isa, blocks=21)
    query = torch.randn(len(LENS), heads, dim).to(dtype)
    _assert_as_good(*_outputs(bench, _common(TABLES, LENS), query), dtype)
    together = [0, 3, 5, 6]  # one group in batch order: nothing is gathered
    common = _common([TABLES[i] for i in together], [LENS[i] for i in together])
    _assert_as_good(*_outputs(bench, common, query[together].clone()), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_context_whose_values_vanish_still_weighs(dtype: torch.dtype) -> None:
    bench = _bench(4, 2, 64, dtype, "vec", blocks=21)
    bench.values[10 * BLOCK : 11 * BLOCK, 1] = 0  # row 0's context, one KV head
    _write(bench)
    query = torch.randn(len(LENS), 4, 64).to(dtype)
    common = _common(TABLES, LENS)
    exact_lse = cpu.RelayImpl._exact_context_lse
    with mock.patch.object(cpu.RelayImpl, "_exact_context_lse", autospec=True) as asked:
        asked.side_effect = exact_lse
        _assert_as_good(*_outputs(bench, common, query), dtype)
    assert asked.called


def test_a_head_whose_values_are_all_zero_gives_zeros_without_a_detour() -> None:
    bench = _bench(4, 2, 64, torch.bfloat16, "vec", blocks=21)
    bench.values[:, 1] = 0
    _write(bench)
    query = torch.randn(len(LENS), 4, 64).bfloat16()
    with mock.patch.object(cpu.RelayImpl, "_exact_context_lse") as asked:
        relay, stock, exact = _outputs(bench, _common(TABLES, LENS), query)
    assert not asked.called and (relay[:, 2:] == 0).all()
    _assert_as_good(relay, stock, exact, torch.bfloat16)


def test_a_reused_block_is_read_anew() -> None:
    dtype = torch.bfloat16
    bench = _bench(4, 2, 64, dtype, "vec", blocks=21)
    common = _common(TABLES, LENS)
    query = torch.randn(len(LENS), 4, 64).to(dtype)
    _assert_as_good(*_outputs(bench, common, query), dtype)
    # The blocks of the first group are freed and given to requests with other tokens: a prefill
    # step that writes them, then a decode step with the very same block table.
    prefill = common.replace(
        max_query_len=96,
        num_actual_tokens=96,
        query_start_loc=torch.tensor([0, *[96] * 8], dtype=torch.int32),
        slot_mapping=torch.arange(BLOCK, 4 * BLOCK),
    )
    assert not isinstance(bench.builder.build(0, prefill), cpu.RelayMetadata)
    bench.keys[BLOCK : 4 * BLOCK] = torch.randn(3 * BLOCK, 2, 64).to(dtype)
    _write(bench)
    _assert_as_good(*_outputs(bench, common, query), dtype)


def test_steps_that_the_split_does_not_cover_carry_vllms_own_metadata() -> None:
    bench = _bench(4, 2, 64, torch.bfloat16, "vec", blocks=21)
    decode = _common(TABLES, LENS)
    one = _common(TABLES[:1], LENS[:1])
    for common in (decode.replace(max_query_len=2), decode.replace(causal=False), one):
        assert type(bench.builder.build(0, common)) is cpu.CPUAttentionMetadata


def test_a_segment_over_the_memory_bound_is_cut_to_it_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16
    bench = _bench(4, 2, 64, dtype, "vec", blocks=21)
    bench.builder._copies = SegmentCopies(bytes_per_block=1, max_bytes=2)
    monkeypatch.setattr(metrics, "_said", set())
    monkeypatch.setattr(metrics.logger, "propagate", True)
    with caplog.at_level("WARNING", logger="vllm.relay"):
        metadata = [bench.builder.build(0, _common(TABLES, LENS)) for _ in range(2)][1]
    # the first group has three blocks, the second two; only two fit in all
    assert [group.num_blocks for group in metadata.relay.groups] == [2]
    query = torch.randn(len(LENS), 4, 64).to(dtype)
    _assert_as_good(*_outputs(bench, _common(TABLES, LENS), query), dtype)
    assert len([r for r in caplog.records if "max_copy_gib" in r.getMessage()]) == 1


def test_float16_is_left_to_vllm() -> None:
    impl = _bench(4, 2, 64, torch.bfloat16, "vec", blocks=2).impl
    impl.prepare(SimpleNamespace(isa="vec"), BLOCK, torch.float16)
    assert impl.refusal == "float16"
