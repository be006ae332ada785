"""A layer, its builder and a KV cache on the engine's own kernels, without an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_relay.backend import cpu, cpu_impl
from vllm_relay.backend.packed_cache import PackedCache
from vllm_relay.backend.step_planner import StepPlanner
from vllm_relay.ops import reference
from vllm_relay.sharing import Costs, reads

BLOCK = 32


@dataclass
class Bench:
    """A layer, its builder and a KV cache filled with tokens through the backend's own update."""

    builder: cpu.RelayMetadataBuilder
    impl: cpu_impl.RelayImpl
    layer: Any
    cache: torch.Tensor
    keys: torch.Tensor  # [blocks * BLOCK, Hkv, D] by slot
    values: torch.Tensor

    def plan_by(
        self, costs: Costs | None = None, room: int = 10**6, continuity: Any = None
    ) -> PackedCache:
        """Plan by these costs from now on (KV reads where None), with ``room`` packed blocks."""
        packed = PackedCache(1, room)
        self.impl.packed = packed
        assert self.impl.shape is not None
        self.builder.planner = StepPlanner(
            {self.impl.shape: costs or reads()}, BLOCK, 3, packed, continuity=continuity
        )
        return packed


def make_bench(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    isa: str,
    blocks: int,
    backend: Any = cpu.RelayBackend,
    scores: Mapping[str, Any] | None = None,
    **relay: Any,
) -> Bench:
    """A bench.

    Args:
        scores: of the layer: window, softcap, slopes [heads], sinks [heads].
        relay: settings of the backend; the groups that read least, unless told otherwise.
    """
    scores = scores or {}
    model = SimpleNamespace(
        dtype=dtype, get_num_attention_heads=lambda parallel: heads, is_mm_prefix_lm=False
    )
    config = SimpleNamespace(
        model_config=model,
        # Not the block size of block tables, as in vLLM 0.27.
        cache_config=SimpleNamespace(
            block_size=4 * BLOCK,
            cache_dtype="auto",
            kv_sharing_fast_prefill=False,
            num_gpu_blocks=blocks,
            kv_cache_memory_bytes=None,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        parallel_config=SimpleNamespace(
            rank=0,
            decode_context_parallel_size=1,
            use_ubatching=False,
            world_size=1,
            data_parallel_size_local=1,
        ),
        kv_transfer_config=None,
        additional_config={"relay": {"min_saved_tokens": 0, **relay}},
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=kv_heads, head_size=dim, dtype=dtype)
    layer = SimpleNamespace(isa=isa, layer_name="layer", _k_scale_float=1.0, _v_scale_float=1.0)

    def layers(*args: Any) -> dict[str, Any]:
        return {"layer": layer}

    with (
        mock.patch.object(cpu_attn, "get_current_vllm_config", lambda: config, create=True),
        mock.patch.object(cpu_attn, "_get_attn_isa", lambda *args: isa),
        mock.patch.object(cpu_attn, "get_layers_from_vllm_config", layers, create=True),
        mock.patch.object(
            cpu_attn, "get_num_attention_heads_from_layers", lambda *args: heads, create=True
        ),
        mock.patch.object(cpu, "get_layers_from_vllm_config", layers),
        # It would write to pytest's log when that is closed.
        mock.patch.object(cpu.metrics, "report_at_exit"),
    ):
        slopes = scores.get("slopes")
        impl = cpu_impl.RelayImpl(
            heads,
            dim,
            dim**-0.5,
            kv_heads,
            None if slopes is None else slopes.tolist(),
            scores.get("window"),
            "auto",
            scores.get("softcap"),
            sinks=scores.get("sinks"),
        )
        impl.isa = isa
        layer.impl = impl
        builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))

    g = torch.Generator().manual_seed(heads + dim)
    keys, values = (
        torch.randn(blocks * BLOCK, kv_heads, dim, generator=g).to(dtype) for _ in range(2)
    )
    keys *= 1.5
    cache = torch.zeros(blocks, kv_heads, BLOCK, 2 * dim, dtype=dtype)
    bench = Bench(builder, impl, layer, cache, keys, values)
    write(bench)
    return bench


def write(bench: Bench) -> None:
    slots = torch.arange(len(bench.keys))
    bench.impl.do_kv_cache_update(bench.layer, bench.keys, bench.values, bench.cache, slots)


def make_step(
    tables: list[list[int]], lens: list[int], queries: list[int] | None = None
) -> CommonAttentionMetadata:
    queries = queries or [1] * len(lens)
    rows, width = len(tables), max(map(len, tables)) + 2
    table = torch.full((rows, width), 7, dtype=torch.int32)  # stale ids beyond a row's blocks
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = torch.tensor(blocks)
    starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
    slots = [
        tables[row][position // BLOCK] * BLOCK + position % BLOCK
        for row, (length, count) in enumerate(zip(lens, queries, strict=True))
        for position in range(length - count, length)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=rows,
        num_actual_tokens=len(slots),
        max_query_len=max(queries),
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
    )


def forward(bench: Bench, metadata: Any, query: torch.Tensor) -> torch.Tensor:
    """Output of the layer under this metadata, ``[T, Hq, D]`` fp64."""
    out = torch.full_like(query, torch.nan)
    bench.impl.forward(bench.layer, query, query, query, bench.cache, metadata, out)
    return out.double()


def outputs(
    bench: Bench, common: CommonAttentionMetadata, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output of relay, of vLLM's own path, and of the oracle, each ``[T, Hq, D]`` fp64."""
    metadata = bench.builder.build(0, common)
    assert isinstance(metadata, cpu_impl.RelayMetadata)
    stock = cpu.CPUAttentionMetadataBuilder.build(bench.builder, 0, common)
    exact = []
    for row in range(common.num_reqs):
        length = int(common.seq_lens[row])
        position = torch.arange(length)
        blocks = common.block_table_tensor[row].long()
        slots = blocks[position // BLOCK] * BLOCK + position % BLOCK
        k, v = bench.keys[slots], bench.values[slots]
        mine = query[common.query_start_loc[row] : common.query_start_loc[row + 1]]
        exact.append(reference.attention_lse(mine, k, v, causal=True, **_scores(bench.impl))[0])
    relay, own = forward(bench, metadata, query), forward(bench, stock, query)
    return relay, own, torch.cat(exact).double()


def _scores(impl: cpu_impl.RelayImpl) -> dict[str, Any]:
    """Arguments of the oracle."""
    return {
        "window": impl.sliding_window - 1 if impl.sliding_window > 0 else None,
        "softcap": impl.logits_soft_cap,
        "slopes": impl.alibi_slopes,
        "sinks": impl.sinks,
    }


def assert_as_good(
    relay: torch.Tensor, stock: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> None:
    """Error against fp64 is at most twice that of vLLM's own path on the same inputs."""
    bound, error = (stock - exact).abs(), (relay - exact).abs()
    # Below the resolution of fp32 the two differ by summation order alone.
    floor = 1e-5 * exact.abs().max()
    assert error.square().mean().sqrt() <= 2 * bound.square().mean().sqrt() + floor
    # The largest error may hold one more rounding: partials are stored in the query's dtype.
    rounding = torch.finfo(dtype).eps / 2 * exact.abs().max()
    assert error.max() <= 2 * bound.max() + rounding + floor
