"""What `calibrate` times where relayed steps run on PyTorch's and vLLM's kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_relay.backend.copies import SegmentCopy
from vllm_relay.backend.probe import Probe, Shape
from vllm_relay.ops.cpu import system as torch_system
from vllm_relay.ops.cpu.fusion import fuse_into


def context(probe: Probe, shape: Shape) -> Callable[[], Any]:
    """Context attention of rows alone, with the LSE."""
    common = probe.step(shape)
    lens = common.seq_lens.numpy()
    queries = np.full(shape.rows, shape.queries, dtype=np.int32)
    tables = common.block_table_tensor.numpy()
    metadata, twice = probe.builder._context(common, tables, lens, queries)
    query = probe.query(common)
    lse = torch.zeros(query.shape[1], query.shape[0])

    def call() -> Any:
        layer = probe.next_layer()
        return layer.impl.attend_context(
            layer, query, probe.cache(layer), metadata, twice, [query], [lse]
        )

    return call


def system(
    probe: Probe, query: torch.Tensor, table: np.ndarray
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """System attention of queries ``[T, Hq, D]`` to a copied segment of these blocks."""
    impl, blocks = probe.impl, slice(0, len(table))
    segment = SegmentCopy(np.array(table), 0, 0)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        layer = probe.next_layer()
        assert layer.impl._layout is not None  # or the layer would be refused
        k, v = segment.rows(layer.layer_name, probe.cache(layer), layer.impl._layout, blocks)
        return torch_system.system_attention(query, k, v, impl.scale)

    return call


def fusion(probe: Probe, partials: int, tokens: int) -> Callable[[], Any]:
    """Fusion of so many partials, the first of them brought into the order of the others."""
    impl, dtype = probe.impl, probe.dtype
    shape = (partials, tokens, impl.num_heads, impl.head_size)
    outs = list(torch.randn(shape).to(dtype))
    lses = list(torch.randn(partials, impl.num_heads, tokens))
    index = torch.randperm(tokens)
    out = torch.empty_like(outs[0])
    return lambda: fuse_into(out, index, [outs[0][index], *outs[1:]], lses)


def copy(probe: Probe, blocks: int) -> Callable[[], Any]:
    """A copy of so many blocks."""
    ids = list(range(1, blocks + 1))
    layout, impl = probe.impl._layout, probe.impl
    assert layout is not None

    def call() -> None:
        cache = probe.cache(probe.next_layer())
        keys = cache.new_empty(impl.num_kv_heads, blocks * probe.block, impl.head_size)
        layout.copy_rows(cache, ids, keys, torch.empty_like(keys))

    return call
