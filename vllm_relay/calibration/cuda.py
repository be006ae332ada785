"""Measurement of the cost model's constants on a GPU, on the layers of a running engine.

Whole layers are timed in CUDA graphs, vLLM's own attention and relay's, on steps whose requests
share blocks: vLLM's own finds in L2 what another request has just read. Before each replay L2 is
overwritten, as by the layers in between.
"""

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder

from vllm_relay.backend.cuda import RelayMetadataBuilder
from vllm_relay.backend.cuda_impl import RelayImpl, RelayMetadata, copy_builder
from vllm_relay.backend.cuda_support import window_of
from vllm_relay.calibration.fitting import Measurement, fit, versions
from vllm_relay.calibration.steps import Shape, describe, tables_of
from vllm_relay.sharing import KernelCosts
from vllm_relay.sharing.cost_store import Constants
from vllm_relay.sharing.gpu import L2_SHARE

KV_BYTES, FLUSH_BYTES = 3 << 30, 512 << 20
REPLAYS = 21


class Calibrator:
    """A method of the engine's workers (vLLM's ``worker_extension_cls``)."""

    def measure_attention(self) -> list[dict[str, Any]]:
        """A `Measurement` of each head shape, as plain data."""
        return [asdict(measure(*probed)) for probed in _probed_layers(self)]


def _probed_layers(worker: Any) -> Iterator[tuple[RelayMetadataBuilder, Any]]:
    """A builder and a layer of it that sees all keys, one for each head shape.

    Raises:
        ValueError: relay serves no such layer.
    """
    seen = set()
    for groups in worker.model_runner.attn_groups:
        for group in groups:
            builder = group.get_metadata_builder()
            for layer in getattr(builder, "layers", ()):
                impl = layer.impl
                shape = (impl.num_heads, impl.num_kv_heads, impl.head_size)
                if impl.refusal is None and not window_of(impl) and shape not in seen:
                    seen.add(shape)
                    yield builder, layer
    if not seen:
        raise ValueError("relay's CUDA backend serves no layer of this model that sees all keys")


def steps(l2_tokens: int, block: int, most_rows: int) -> list[Shape]:
    """Steps with nothing shared, with prefixes inside L2 and beyond it.

    Args:
        l2_tokens: of one layer's KV, that L2 holds.
    """
    inside, beyond = (max(x // block, 1) * block for x in (l2_tokens // 2, 4 * l2_tokens))
    alone = [Shape(rows, 0, own, 1, 0) for rows, own in ((16, 1024), (16, 4096), (64, 512))]
    sharing = [
        Shape(rows, shared, own)
        for rows, shared, own in (
            (8, inside, 256), (32, inside, 256), (128, inside, 64), (32, inside, 1024),
            (8, beyond, 256), (32, beyond, 256), (128, beyond, 64), (4, 4 * block, 64),
        )
    ]  # fmt: skip
    return [step for step in (*alone, *sharing) if step.rows <= most_rows]


def measure(builder: RelayMetadataBuilder, layer: Any) -> Measurement:
    """The constants of one head shape on this GPU, and how well they fit.

    Raises:
        ValueError: a quantised KV cache, too little memory or too few requests to measure, a step
            that relay leaves to vLLM, or times that no constants explain.
    """
    impl: RelayImpl = layer.impl
    item = builder.kv_cache_spec.dtype.itemsize
    if not builder.kv_cache_spec.dtype.is_floating_point or item == 1:
        raise ValueError("calibrate: a quantised KV cache is not measured; leave kv_cache_dtype")
    kv = 2 * impl.num_kv_heads * impl.head_size * item
    device = torch.cuda.get_device_properties(builder.device)
    near = int(L2_SHARE * device.L2_cache_size / kv)
    probe = _Probe(builder, layer)
    most = builder.vllm_config.scheduler_config.max_num_seqs
    every = [step for step in steps(near, probe.block, most) if probe.fits(step)]
    # The longest first: it makes the plan's tables.
    shared = sorted((s for s in every if s.groups), key=lambda s: -s.shared - s.own)
    if len(shared) < 4 or len(every) < 6:
        raise ValueError(
            f"calibrate: only {len(every)} steps fit; max_num_seqs {most} is too small, or "
            "gpu_memory_utilization leaves too little memory"
        )

    units = np.array([1.0, kv, kv, kv])
    of_stock, stock_error = fit(
        [_work(step, near) for step in every] * units, [probe.stock(step) for step in every]
    )
    call, first, read, far = of_stock
    flops = 4 * impl.num_heads * impl.head_size
    units = np.array([1.0, kv, kv, flops])
    work = [[1, s.rows * s.own, s.shared, s.rows * s.shared] for s in shared]
    of_relay, error = fit(work * units, [probe.relay(step) for step in shared])
    if read <= 0:
        raise ValueError("calibrate: the times fit no model; is another process on this GPU?")
    system = KernelCosts(call=max(of_relay[0] - call, 0.0), first=of_relay[2], pair=of_relay[3])
    # What is read once is read from memory; a second reader finds it in L2, as in vLLM's own.
    once = min(read, of_relay[1])
    constants = Constants(
        device=device.name,
        threads=1,
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        dtype=str(builder.kv_cache_spec.dtype).removeprefix("torch."),
        cache=max(near * kv, 1),
        stock=KernelCosts(call=call, first=first, read=read, far=far),
        context=KernelCosts(call=call, first=of_relay[1] - once, read=once),
        system=system,
        packed=system,
        fusion=0.0,
        step=0.0,
        level=0.0,
        copy=0.0,
        measured=f"{date.today()}, {versions()}",
    )
    of_ours = dict.fromkeys(("context", "system", "packed", "whole"), error)
    return Measurement(constants, {"stock": stock_error, **of_ours}, REPLAYS)


def _work(shape: Shape, near: int) -> list[float]:
    """Units of work of vLLM's own attention, in tokens: call, first reads, reads, far reads."""
    each = shape.shared + shape.own
    first = shape.rows * shape.own + shape.groups * shape.shared
    return [1, first, shape.rows * each, shape.rows * max(each - near, 0)]


class _Probe:
    """Times one layer on synthetic steps, over a KV cache and plans of its own."""

    def __init__(self, builder: RelayMetadataBuilder, layer: Any) -> None:
        # The engine's has tables that are too narrow.
        self._builder = RelayMetadataBuilder(
            builder.kv_cache_spec, builder.layer_names, builder.vllm_config, builder.device
        )
        self._layer, self._impl = layer, copy.copy(layer.impl)
        self._impl.failed = None  # a fault is an error here
        self.block = builder.block_size
        like = layer.kv_cache
        one = like[:1].numel() * like.itemsize
        blocks = max(_free_bytes(KV_BYTES) // one, 2)
        # As the engine's lies in memory.
        order = sorted(range(4), key=lambda i: -like.stride(i))
        sizes = (blocks, *like.shape[1:])
        cache = torch.randn([sizes[i] for i in order], dtype=like.dtype, device=like.device)
        self.cache = cache.permute([order.index(i) for i in range(4)])
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=like.device)

    def fits(self, step: Shape) -> bool:
        """True if the KV cache holds the step."""
        return tables_of(step, self.block)[1] < len(self.cache)

    def stock(self, step: Shape) -> float:
        """Seconds of vLLM's own attention."""
        common = describe(step, self.block, self.cache.device)
        builder = copy_builder(self._builder)
        metadata = FlashAttentionMetadataBuilder.build(builder, 0, common)
        return self._seconds(FlashAttentionImpl.forward, metadata, common.num_actual_tokens)

    def relay(self, step: Shape) -> float:
        """Seconds of relay's."""
        common = describe(step, self.block, self.cache.device)
        metadata = self._builder.build_for_cudagraph_capture(common)
        plan = self._builder.device_plan
        if not isinstance(metadata, RelayMetadata) or plan is None or not plan.newest()[0].groups:
            raise ValueError(f"calibrate: relay leaves {step} to vLLM")
        return self._seconds(RelayImpl.forward, metadata, common.num_actual_tokens)

    def _seconds(self, forward: Callable[..., Any], metadata: Any, tokens: int) -> float:
        shape = (tokens, self._impl.num_heads, self._impl.head_size)
        query = torch.randn(shape, dtype=self.cache.dtype, device=self.cache.device)
        out = torch.empty_like(query)

        def work() -> None:
            forward(self._impl, self._layer, query, query, query, self.cache, metadata, out)

        return seconds_in_graph(work, self._flush)


def _free_bytes(most: int) -> int:
    """Half of the memory that is free, and no more than asked for."""
    return min(most, torch.cuda.mem_get_info()[0] // 2)


def seconds_in_graph(work: Callable[[], None], flush: torch.Tensor) -> float:
    """Median time of a CUDA graph of ``work``, after ``flush`` was written over L2."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # kernels cannot be loaded in a capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    taken = []
    for _ in range(REPLAYS + 1):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(taken[1:])
