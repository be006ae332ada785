"""What `calibrate` times where relayed steps run on our own kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_relay.backend.cpu_native import make_step
from vllm_relay.calibration.probe import Probe, Shape
from vllm_relay.ops.attention.native import call_for, make_results
from vllm_relay.ops.fusion.native import fuse
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.packed import PackedSegment
from vllm_relay.sharing import RelayPlan


def context(probe: Probe, shape: Shape) -> Callable[[], Any]:
    """Contexts of rows alone."""
    common = probe.step(shape)
    tables, lens = common.block_table_tensor.numpy(), common.seq_lens.numpy()
    plan = RelayPlan(np.zeros(0, dtype=np.int32), (), tables, lens)
    queries = np.full(shape.rows, shape.queries, dtype=np.int32)
    step = make_step(plan, [], np.arange(shape.rows), queries, None, probe.impl, probe.dtype)
    query = probe.query(common)
    out = torch.empty_like(query)

    def call() -> None:
        layer = probe.next_layer()
        step.run(layer, layer.impl._layout, query, probe.cache(layer), out)

    return call


def system(
    probe: Probe, query: torch.Tensor, table: np.ndarray, packed: bool = False
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """System attention of queries ``[T, Hq, D]`` to a segment of these blocks."""
    impl = probe.impl
    table = np.ascontiguousarray(table, dtype=np.int32)
    sequence = np.zeros((1, native.TABLE + 1), dtype=np.int64)
    sequence[0, native.QUERIES], sequence[0, native.KEYS] = len(query), len(table) * probe.block
    sequence[0, native.TABLE] = table.ctypes.data
    layouts = {layer.layer_name: _layout(probe, layer) for layer in probe.layers}
    segments = {}
    if packed:
        segments = {name: _pack(probe, layout, table) for name, layout in layouts.items()}

    # Laid out once, as a step is.
    layout = (native.Layout * 1)()
    prepared = call_for(query, impl.num_kv_heads, impl.scale, layout, sequence)
    results = make_results(prepared, query)
    keep = (query, table, sequence)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        name = probe.next_layer().layer_name
        layout[0] = segments[name].layout if packed else layouts[name]
        assert keep  # what the call has the addresses of
        native.loaded().attend(prepared)
        return results

    return call


def fusion(probe: Probe, partials: int, tokens: int) -> Callable[[], Any]:
    """Fusion of so many partials into other places."""
    impl = probe.impl
    outs = list(torch.randn(partials, tokens, impl.num_heads, impl.head_size))
    lses = list(torch.randn(partials, impl.num_heads, tokens))
    places = torch.randperm(tokens)
    out = torch.empty_like(outs[0], dtype=probe.dtype)
    return lambda: fuse(outs, lses, out, places)


def copy(probe: Probe, blocks: int) -> Callable[[], Any]:
    """Packing of so many blocks."""
    table = np.arange(1, blocks + 1, dtype=np.int32)
    return lambda: _pack(probe, _layout(probe, probe.next_layer()), table)


def _layout(probe: Probe, layer: Any) -> native.Layout:
    layout: native.Layout | None = layer.impl._layout.for_kernels(probe.cache(layer))
    assert layout is not None  # or our kernels would not be used
    return layout


def _pack(probe: Probe, layout: native.Layout, table: np.ndarray) -> PackedSegment:
    impl, tokens = probe.impl, len(table) * probe.block
    return PackedSegment(layout, impl.num_kv_heads, impl.head_size, probe.dtype, tokens, table)
