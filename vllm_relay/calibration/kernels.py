"""The CPU kernels one by one on synthetic inputs, for calibration and benchmarks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_relay.calibration.probe import Probe
from vllm_relay.ops.fusion.native import fuse
from vllm_relay.ops.native.packed import PackedSegment
from vllm_relay.ops.native.prepared import PreparedAttention
from vllm_relay.ops.step.native import sequences_of
from vllm_relay.plan import Part


def system(
    probe: Probe, query: torch.Tensor, table: np.ndarray, packed: bool = False
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """System attention of queries ``[T, Hq, D]`` to a segment of these blocks."""
    table = np.ascontiguousarray(table, dtype=np.int32)
    tokens = len(table) * probe.block
    part = Part(
        query_start_loc=np.array([0, len(query)], dtype=np.int32),
        seq_lens=np.array([tokens], dtype=np.int32),
        block_table=table[None],
        max_query_len=len(query),
        max_seq_len=tokens,
        causal=False,
    )
    segment = _pack(probe, table) if packed else None
    # Laid out once, as a step is.
    out = torch.empty_like(query)
    prepared = PreparedAttention(sequences_of(part), len(query), probe.shape, lse=True)
    prepared.layouts[0] = probe.layout if segment is None else segment.layout
    keep = (table, segment)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        assert keep  # what the call has the addresses of
        prepared.run(query, out)
        return out, prepared.lse[0]

    return call


def fusion(probe: Probe, partials: int, tokens: int) -> Callable[[], Any]:
    """Fusion of so many partials into other places."""
    heads, size = probe.shape.heads, probe.shape.head_size
    outs = list(torch.randn(partials, tokens, heads, size))
    lses = list(torch.randn(partials, heads, tokens))
    places = torch.randperm(tokens)
    out = torch.empty_like(outs[0], dtype=probe.shape.dtype)
    return lambda: fuse(outs, lses, out, places)


def copy(probe: Probe, blocks: int) -> Callable[[], Any]:
    """Packing of so many blocks, into memory that the process has used.

    New memory costs more, but once: what is freed is used again.
    """
    table = np.arange(1, blocks + 1, dtype=np.int32)
    segment = _pack(probe, table)
    return lambda: segment.pack(probe.layout, table)


def _pack(probe: Probe, table: np.ndarray) -> PackedSegment:
    shape = probe.shape
    return PackedSegment(probe.layout, shape.kv_heads, shape.head_size, shape.dtype, table)
