"""The CPU engine's attention and ours on synthetic steps, timed alone.

Runs in the process that serves, with its threads and kernels, on a KV cache of its own.
"""

import copy
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_relay.backend.cpu_impl import RelayImpl, RelayMetadata
from vllm_relay.backend.packed_cache import PackedCache
from vllm_relay.backend.step_planner import StepPlanner
from vllm_relay.calibration.steps import Shape, describe, tables_of
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.plan import SharingStats
from vllm_relay.sharing import Costs, reads

# Bytes read before each timed call, like a model's weights between steps. A shared L3 cache of
# hundreds of MB is not emptied: a round would take seconds.
_FLUSH_BYTES = 128 << 20
# Bytes read between a small call, which stands for the layer before, and the timed one, like one
# layer's weights.
_LAYER_BYTES = 8 << 20


class Probe:
    """Times attention of one shape.

    Args:
        builder: vLLM's, of layers with these heads. layer: one of them, with our ``impl``.
        shape: of the attention; heads, head size and dtype are the layer's.
        kv_bytes: of the KV cache that is made for it. flush_bytes: read before each timed call, at
            least; 0: what is affordable at a start.
        slopes: float32 ``[Hq]``, ALiBi's. sinks: ``[Hq]``.

    Attributes:
        block: tokens per KV block. cache: ``[blocks, Hkv, block, 2 D]``, random.
    """

    def __init__(
        self,
        builder: CPUAttentionMetadataBuilder,
        layer: Any,
        shape: AttentionShape,
        kv_bytes: int,
        *,
        flush_bytes: int = 0,
        slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.isa: str = builder.isa
        self.block: int = builder.kv_cache_spec.block_size
        self._builder = copy.copy(builder)
        self._builder.window_size = shape.window or -1
        self._layer = layer
        self.impl: RelayImpl = copy.copy(layer.impl)
        self.impl.shape = shape
        self.impl.sliding_window = shape.window or -1
        self.impl.logits_soft_cap = shape.softcap
        self.impl.alibi_slopes, self.impl.sinks = slopes, sinks
        self.impl.failed = _fail
        of_block = (shape.kv_heads, self.block, 2 * shape.head_size)
        blocks = max(kv_bytes // (int(np.prod(of_block)) * shape.dtype.itemsize), 16)
        self.cache = torch.empty(blocks, *of_block, dtype=shape.dtype)
        some = torch.randn(min(blocks, 64), *of_block).to(shape.dtype)
        for part in self.cache.split(64):  # numbers take longer to make than to copy
            part.copy_(some[: len(part)])
        near = 2 * torch.get_num_threads() * cache_bytes()  # twice the caches of all cores
        self._flush = torch.zeros(max(flush_bytes, near, _FLUSH_BYTES) // 4)
        self._layer_weights = self._flush[: _LAYER_BYTES // 4]
        self._new = torch.zeros(1, shape.kv_heads, shape.head_size, dtype=shape.dtype)
        self._slot = torch.tensor([blocks * self.block - 1])  # of the last token in the cache
        self._random = random.Random(0)
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def layout(self) -> native.Layout:
        """The KV cache as our kernels read it."""
        return self.impl.kernel_layout(self.cache)

    def fits(self, shape: Shape) -> bool:
        """True if the KV cache holds the step."""
        return tables_of(shape, self.block)[1] < len(self.cache)

    def step(self, shape: Shape) -> CommonAttentionMetadata:
        """The step as the model runner describes it."""
        return describe(shape, self.block)

    def query(self, tokens: int) -> torch.Tensor:
        """Queries ``[T, Hq, D]``; the same for the same number of tokens."""
        generator = torch.Generator().manual_seed(tokens)
        shape = (tokens, self.shape.heads, self.shape.head_size)
        return torch.randn(shape, generator=generator).to(self.shape.dtype)

    def stock(self, common: CommonAttentionMetadata) -> Callable[[], torch.Tensor]:
        """vLLM's own attention of a step."""
        return self._forward(CPUAttentionMetadataBuilder.build(self._builder, 0, common), common)

    def relay(
        self, common: CommonAttentionMetadata, costs: Costs, levels: int = 1
    ) -> tuple[Callable[[], torch.Tensor], SharingStats | None]:
        """Relay's backend on a step planned by these costs; and what the step shares.

        None where it is left to vLLM's own attention. Segments are packed at once, as if their
        price had been paid.
        """
        costs, packed = replace(costs, copy=0.0), PackedCache(1, 2**62)
        planner = StepPlanner({self.shape: costs}, self.block, levels, packed)
        metadata = CPUAttentionMetadataBuilder.build(self._builder, 0, common)
        planned = planner.plan(common)
        if not planned:
            return self._forward(metadata, common), None
        (found,) = planned.values()
        metadata = RelayMetadata(**vars(metadata), relay={self.shape: found.step})
        return self._forward(metadata, common, RelayImpl.forward_relayed), found.stats

    def _forward(
        self,
        metadata: CPUAttentionMetadata,
        common: CommonAttentionMetadata,
        forward: Callable[..., torch.Tensor] = CPUAttentionBackendImpl.forward,
    ) -> Callable[[], torch.Tensor]:
        # The same memory for every call on so many tokens: where it lies changes the time, too.
        tokens = common.num_actual_tokens
        if tokens not in self._buffers:
            query = self.query(tokens)
            self._buffers = {tokens: (query, torch.empty_like(query))}
        query, out = self._buffers[tokens]
        return lambda: forward(
            self.impl, self._layer, query, query, query, self.cache, metadata, out
        )

    def _write(self) -> None:
        """Write a token's keys and values, as the engine does right before a layer's attention."""
        self.impl.do_kv_cache_update(self._layer, self._new, self._new, self.cache, self._slot)

    def _code(self) -> list[Callable[[], Any]]:
        """vLLM's attention and ours of a small step with a group, at the end of the KV cache."""
        small = self.step(Shape(8, self.block, 1))
        small.block_table_tensor += len(self.cache) - 1 - int(small.block_table_tensor.max())
        kept, self._buffers = self._buffers, {}
        code = [self.stock(small), self.relay(small, reads())[0]]
        self._buffers = kept
        return code

    def rounds(
        self,
        calls: Sequence[Callable[[], Any]],
        repeats: int,
        *,
        cold: bool = True,
        seconds: float = math.inf,
    ) -> list[list[float]]:
        """Seconds of each call, interleaved; the order of a round is random, by a fixed seed.

        First each runs once, which packs segments. With ``cold`` the caches hold attention's code,
        and data of a call only where they exceed what is flushed; else the same call has just read
        its data. Ends before a round that would not be over in so many ``seconds``, but not before
        the first.
        """
        code = self._code() if cold else []
        started = time.perf_counter()
        for call in calls:
            call()
        taken: list[list[float]] = [[] for _ in calls]
        order = list(zip(calls, taken, strict=True))
        for _ in range(repeats):
            self._random.shuffle(order)  # what ran before a call has its part in its time
            round_started = time.perf_counter()
            for call, times in order:
                if cold:
                    self._flush.sum()
                    self._random.shuffle(code)
                    for run in code:
                        run()
                    self._layer_weights.sum()
                    self._write()  # which brings vLLM's own operators into the caches
                else:
                    call()
                begun = time.perf_counter()
                call()
                times.append(time.perf_counter() - begun)
            now = time.perf_counter()
            if now - started + now - round_started > seconds:
                break
        return taken


def _fail(doing: str, error: Exception) -> None:
    """In place of the builder's fallback: a fault is an error here."""
    raise error


def cache_bytes(level: int = 2) -> int:
    """Bytes of the first core's L2 or L3 cache; 1 MiB where the system does not tell."""
    told = Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size")
    found = re.fullmatch(r"(\d+)([KM])\s*", told.read_text()) if told.exists() else None
    return int(found[1]) << (10 if found[2] == "K" else 20) if found else 1 << 20
