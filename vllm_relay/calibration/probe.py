"""The attention of a running CPU engine on synthetic steps, timed alone.

Used inside the engine's worker (``llm.collective_rpc``), with the layers, KV caches and threads
that serve.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_relay.backend.cpu import RelayMetadataBuilder
from vllm_relay.backend.cpu_impl import RelayImpl, RelayMetadata
from vllm_relay.backend.packed_cache import PackedCache
from vllm_relay.backend.step_planner import StepPlanner
from vllm_relay.plan import SharingStats
from vllm_relay.sharing import Costs

# Read between calls to empty the caches, as the weights of the layers in between do in a model.
_FLUSH_BYTES = 128 << 20


@dataclass(frozen=True)
class Shape:
    """A step of equal groups.

    Attributes:
        rows: requests. shared: tokens of each group's prefix. own: of each request after it.
        queries: of each request, the last of its own tokens. groups: equal shares of the requests;
            0: nothing is shared.
    """

    rows: int
    shared: int
    own: int
    queries: int = 1
    groups: int = 1


class Probe:
    """Times the first KV cache group that relay serves; ValueError where there is none."""

    def __init__(self, worker: Any) -> None:
        builders = (
            group.get_metadata_builder()
            for groups in worker.model_runner.attn_groups
            for group in groups
        )
        served = (b for b in builders if isinstance(b, RelayMetadataBuilder) and b.planner)
        found = next(served, None)
        if found is None:
            raise ValueError("relay's CPU backend does not serve this model")
        self.builder: RelayMetadataBuilder = found
        layers = get_layers_from_vllm_config(worker.vllm_config, Attention, found.layer_names)
        self.layers = [layer for layer in layers.values() if layer.impl.shape is not None]
        self.impl: RelayImpl = self.layers[0].impl
        assert self.impl.shape is not None
        self.shape = self.impl.shape
        self.block: int = found.kv_cache_spec.block_size
        self.dtype: torch.dtype = self.cache(self.layers[0]).dtype
        self.heads: tuple[int, int] = (self.impl.num_heads, self.impl.head_size)
        self._flush = torch.zeros(_FLUSH_BYTES // 4)
        self._turn = 0
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        some = torch.randn(self.cache(self.layers[0])[:64].shape)
        for layer in self.layers:
            for blocks in self.cache(layer).split(64):  # numbers take longer to make than to copy
                blocks.copy_(some[: len(blocks)])
        self.blocks: int = self.cache(self.layers[0]).shape[0]

    @staticmethod
    def cache(layer: Any) -> torch.Tensor:
        cache = layer.kv_cache
        return cache if isinstance(cache, torch.Tensor) else cache[0]

    def fits(self, shape: Shape) -> bool:
        """True if the KV cache holds the step."""
        return self._tables(shape)[1] < self.blocks

    def step(self, shape: Shape) -> CommonAttentionMetadata:
        """The step as the model runner describes it."""
        tables, _ = self._tables(shape)
        count, lens = shape.rows, shape.shared + shape.own
        starts = torch.arange(count + 1, dtype=torch.int32) * shape.queries
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.full((count,), lens, dtype=torch.int32),
            num_reqs=count,
            num_actual_tokens=count * shape.queries,
            max_query_len=shape.queries,
            max_seq_len=lens,
            block_table_tensor=torch.from_numpy(tables),
            slot_mapping=torch.full((count * shape.queries,), -1),
        )

    def _tables(self, shape: Shape) -> tuple[np.ndarray, int]:
        """Block tables and the last block; own blocks first, then those of the groups."""
        shared, own = shape.shared // self.block, -(-shape.own // self.block)
        groups = shape.groups or shape.rows
        rows = np.arange(shape.rows)
        mine = 1 + rows[:, None] * own + np.arange(own)
        of_group = rows * groups // shape.rows
        prefix = 1 + shape.rows * own + of_group[:, None] * shared + np.arange(shared)
        tables = np.concatenate([prefix, mine], axis=1).astype(np.int32)
        return tables, int(tables.max())

    def query(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Queries of a step, ``[T, Hq, D]``; equal for equal shapes."""
        shape = (common.num_actual_tokens, *self.heads)
        generator = torch.Generator().manual_seed(shape[0])
        return torch.randn(shape, generator=generator).to(self.dtype)

    def stock(self, common: CommonAttentionMetadata) -> Callable[[], torch.Tensor]:
        """vLLM's own attention of a step, one layer per call."""
        return self._forward(CPUAttentionMetadataBuilder.build(self.builder, 0, common), common)

    def relay(
        self, common: CommonAttentionMetadata, costs: Costs, levels: int = 1
    ) -> tuple[Callable[[], torch.Tensor], SharingStats | None]:
        """Relay's backend on a step planned by these costs; and what the step shares.

        None where it is left to vLLM's own attention. Segments are packed at once, as if their
        price had been paid.
        """
        costs, packed = replace(costs, copy=0.0), PackedCache(1, 2**62)
        planner = StepPlanner({self.shape: costs}, self.block, levels, packed)
        metadata = CPUAttentionMetadataBuilder.build(self.builder, 0, common)
        planned = planner.plan(common)
        if not planned:
            return self._forward(metadata, common), None
        ((step, stats),) = planned.values()
        metadata = RelayMetadata(**vars(metadata), relay={self.shape: step})
        return self._forward(metadata, common, RelayImpl.forward_relayed), stats

    def _forward(
        self,
        metadata: CPUAttentionMetadata,
        common: CommonAttentionMetadata,
        forward: Callable[..., torch.Tensor] = CPUAttentionBackendImpl.forward,
    ) -> Callable[[], torch.Tensor]:
        # The same memory for every call on so many tokens: where it lies changes the time, too.
        tokens = common.num_actual_tokens
        if tokens not in self._buffers:
            query = self.query(common)
            self._buffers = {tokens: (query, torch.empty_like(query))}
        query, out = self._buffers[tokens]

        def call() -> torch.Tensor:
            layer = self.next_layer()
            return forward(layer.impl, layer, query, query, query, self.cache(layer), metadata, out)

        return call

    def next_layer(self) -> Any:
        """The next layer, round robin."""
        self._turn = (self._turn + 1) % len(self.layers)
        return self.layers[self._turn]

    def rewind(self) -> None:
        """Start again with the first layer."""
        self._turn = 0

    def seconds(self, call: Callable[[], Any], repeats: int = 7) -> float:
        """Median time of a call with cold caches."""
        return statistics.median(self.rounds([call], repeats)[0])

    def rounds(
        self, calls: Sequence[Callable[[], Any]], repeats: int, *, cold: bool = True
    ) -> list[list[float]]:
        """Seconds of each call, interleaved; forwards, then backwards.

        First each runs once on every layer, which packs segments. With ``cold`` the caches hold
        nothing that a call reads; else the same call has just read it.
        """
        for call in calls:
            for _ in self.layers:
                call()
        taken: list[list[float]] = [[] for _ in calls]
        order = list(zip(calls, taken, strict=True))
        for _ in range(repeats):
            for call, times in order:
                if cold:
                    self._flush.sum()
                else:
                    self.rewind()
                    call()
                    self.rewind()
                begun = time.perf_counter()
                call()
                times.append(time.perf_counter() - begun)
            order.reverse()
        return taken
