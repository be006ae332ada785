"""Worker extension of `bench_attention.py`: times kernels on the engine's KV cache."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness.kv_rows import copy_rows
from benchmarks.harness.roofline import gemm_rate, read_rate
from vllm_relay.calibration import kernels
from vllm_relay.calibration.measure import NO_GROUPS
from vllm_relay.calibration.probe import Probe, cache_bytes
from vllm_relay.calibration.steps import Shape
from vllm_relay.calibration.worker import probed_layers
from vllm_relay.ops import reference
from vllm_relay.ops.native import library as native
from vllm_relay.sharing import reads

Call = Callable[[], torch.Tensor]
# Bytes of the probe's KV cache, which holds the largest case.
CACHE_BYTES = 2 << 30


class AttentionWorker:
    """vLLM's ``worker_extension_cls``."""

    def measure_ceilings(self) -> dict[str, Any]:
        return {
            "threads": torch.get_num_threads(),
            "gemm_gflop_s": gemm_rate() / 1e9,
            "read_gb_s": read_rate() / 1e9,
            "instructions": native.loaded().isa,
        }

    def measure_prefix(self, rows: int, tokens: int, rounds: int) -> dict[str, Any]:
        """Seconds and error of every way to attend to a prefix of all rows."""
        with torch.inference_mode():
            probe = self._probed()
            # Attended to in full by rows that have nothing else.
            common = probe.step(Shape(rows, tokens, 0))
            table = common.block_table_tensor[0].numpy()
            query = probe.query(rows)
            return _measured(
                {
                    "vLLM, row by row": probe.stock(common),
                    "PyTorch's flash kernel": _torch_flash(probe, query, table),
                    "ours, blocks in place": _first(kernels.system(probe, query, table)),
                    "ours, packed": _first(kernels.system(probe, query, table, packed=True)),
                },
                probe,
                _exact(probe, query, table[None].repeat(rows, 0), np.full(rows, tokens), 1),
                rounds,
            )

    def measure_contexts(self, lens: list[int], queries: int, rounds: int) -> dict[str, Any]:
        """Seconds and error of vLLM's kernel and of ours, rows of these lengths."""
        with torch.inference_mode():
            probe = self._probed()
            rows, longest = len(lens), max(lens)
            common = probe.step(Shape(rows, 0, longest, queries, 0))
            given = np.array(lens, dtype=np.int32)
            common = common.replace(seq_lens=torch.from_numpy(given))
            tables, query = common.block_table_tensor.numpy(), probe.query(rows * queries)
            ways = {"vLLM": probe.stock(common), "ours": probe.relay(common, reads(NO_GROUPS))[0]}
            return _measured(ways, probe, _exact(probe, query, tables, given, queries), rounds)

    def measure_speed_up(self, rows: int, prefix: int, own: int, rounds: int) -> dict[str, Any]:
        """Seconds of vLLM's attention and of relay's on whole steps, with caches cold and warm.

        And of relay's kernels on the same step if nothing were shared: the rest is what sharing
        brings.
        """
        with torch.inference_mode():
            probe = self._probed()
            common = probe.step(Shape(rows, prefix, own))
            relay, stats = probe.relay(common, reads())
            if stats is None or not stats.groups:
                raise ValueError(f"{prefix} tokens are no KV block of {probe.block}")
            alone, _ = probe.relay(common, reads(NO_GROUPS))
            ways = {"vLLM": probe.stock(common), "relay": relay, "alone": alone}
            tables, lens = common.block_table_tensor.numpy(), common.seq_lens.numpy()
            exact = _exact(probe, probe.query(rows), tables, lens, 1)
            errors = _errors(ways, probe, exact)
            times = {
                caches: probe.rounds(list(ways.values()), rounds, cold=caches == "flushed")
                for caches in ("flushed", "warm")
            }
        return {"rms_error": errors, "seconds": times}

    def _probed(self) -> Probe:
        if not hasattr(self, "_probe"):
            # All of L3: times stand beside the rate at which memory is read.
            probed = next(probed_layers(self))
            self._probe = Probe(*probed, CACHE_BYTES, flush_bytes=cache_bytes(3))
        return self._probe


def _torch_flash(probe: Probe, query: torch.Tensor, table: np.ndarray) -> Call:
    """PyTorch's CPU flash attention over the segment, copied to dense keys and values before."""
    attention = probe.shape
    shape = (attention.kv_heads, len(table) * probe.block, attention.head_size)
    keys, values = probe.cache.new_empty(shape), probe.cache.new_empty(shape)
    copy_rows(probe.impl._layout, probe.cache, table.tolist(), keys, values)
    # The query heads of one KV head are rows of one product: K and V are read once per KV head.
    rows = query.transpose(0, 1).reshape(1, attention.kv_heads, -1, attention.head_size)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def call() -> torch.Tensor:
        out = flash(rows, keys[None], values[None], scale=attention.scale)[0]
        out = out.reshape(attention.heads, len(query), attention.head_size)
        return out.transpose(0, 1)

    return call


def _first(call: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Call:
    """The output alone."""
    return lambda: call()[0]


def _measured(
    ways: dict[str, Call], probe: Probe, exact: torch.Tensor, rounds: int
) -> dict[str, Any]:
    errors = _errors(ways, probe, exact)
    times = probe.rounds(list(ways.values()), rounds)
    return {
        name: {
            "seconds": statistics.median(taken),
            "least": min(taken),
            "most": max(taken),
            "rms_error": errors[name],
        }
        for name, taken in zip(ways, times, strict=True)
    }


def _errors(ways: dict[str, Call], probe: Probe, exact: torch.Tensor) -> dict[str, float]:
    """Root mean square."""
    errors = {}
    for name, call in ways.items():
        errors[name] = float((call().float() - exact).square().mean().sqrt())
    return errors


def _exact(
    probe: Probe, query: torch.Tensor, tables: np.ndarray, lens: np.ndarray, queries: int
) -> torch.Tensor:
    """Attention in float32, ``[T, Hq, D]``."""
    shape, cache = probe.shape, probe.cache
    outs = []
    before: tuple[bytes, torch.Tensor, torch.Tensor] | None = None
    for row, length in enumerate(lens.tolist()):
        ids = tables[row, : -(-length // probe.block)]
        if before is None or before[0] != ids.tobytes():
            size = (shape.kv_heads, len(ids) * probe.block, shape.head_size)
            k, v = cache.new_empty(size), cache.new_empty(size)
            copy_rows(probe.impl._layout, cache, ids.tolist(), k, v)
            before = (ids.tobytes(), k.float().transpose(0, 1), v.float().transpose(0, 1))
        _, k, v = before
        mine = query[row * queries : (row + 1) * queries]
        out, _ = reference.attention_lse(
            mine, k[:length], v[:length], shape.scale, causal=True, dtype=torch.float32
        )
        outs.append(out)
    return torch.cat(outs)
