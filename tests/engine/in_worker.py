"""Test code inside the engine's processes: forced tokens, planted errors, watched segments.

vLLM loads both classes by name (``logits_processors=``, ``worker_extension_cls=``).
"""

import json
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.harness.force_tokens import ForceTokens  # noqa: F401
from benchmarks.harness.kv_rows import copy_rows
from vllm_relay import metrics
from vllm_relay.backend.layer_report import LayerReporter
from vllm_relay.ops.fusion.native import fuse
from vllm_relay.ops.native import library as native


def _wrong_paged_lse(stock: Any) -> Any:
    def paged_relay(q: Any, k: Any, v: Any, step: Any, attend: Any, **kwargs: Any) -> Any:
        def wrong(part: Any, *args: Any) -> Any:
            lse = attend(part, *args)
            return lse if part.causal else lse + 0.1

        return stock(q, k, v, step, wrong, **kwargs)

    return paged_relay


def _wrong_sequences(change: Callable[[np.ndarray], None]) -> Callable[[Any], Any]:
    """The kernels asked for something else; `change` gets the sequences of segments."""

    def planted(stock: Any) -> Any:
        class Wrong(stock):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                sequences = self.call.sequences
                segments = sequences[:, native.CAUSAL] == 0
                wrong = sequences[segments]
                change(wrong)
                sequences[segments] = wrong

        return Wrong

    return planted


def _one_block_less(sequences: np.ndarray) -> None:
    sequences[:, native.KEYS] -= 128


def _those_of_the_next_group(sequences: np.ndarray) -> None:
    for partial in np.unique(sequences[:, native.PARTIAL]):
        level = sequences[:, native.PARTIAL] == partial
        for column in (native.KEYS, native.LAYOUT, native.TABLE):
            sequences[level, column] = np.roll(sequences[level, column], 1)


def _wrong_native_lse(which: slice) -> Callable[[Any], Any]:
    """The partials of our own kernels merged with an error in the LSE of some of them."""

    def planted(stock: Any) -> Any:
        class Wrong(stock):
            def run(self, query: Any, cache: Any, segments: Any, out: Any, **of_layer: Any) -> None:
                super().run(query, cache, segments, out, **of_layer)
                if self.call.out is None:
                    return
                self.call.lse[which] += 0.1
                fuse(list(self.call.out), list(self.call.lse), out, torch.from_numpy(self.order))

        return Wrong

    return planted


def _wrong_score(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Scores of other products; `change` gets the kernels' ``relay_scores``."""

    def planted(stock: Any) -> Any:
        class Wrong(stock):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                change(self.call._scores)

        return Wrong

    return planted


def _one_key_more(scores: Any) -> None:
    scores.window += bool(scores.window)


def _higher_cap(scores: Any) -> None:
    scores.softcap *= 1.05


def _wrong_of_layer(name: str, factor: float) -> Callable[[Any], Any]:
    """Slopes or sinks times a factor."""

    def planted(stock: Any) -> Any:
        class Wrong(stock):
            def run(self, *args: Any, **of_layer: Any) -> None:
                super().run(*args, **{**of_layer, name: of_layer[name] * factor})

        return Wrong

    return planted


def _turned(stock: Any) -> Any:
    """Keys of blocks read as if they lay token by token."""

    def kernel_layout(self: Any, kv_cache: Any) -> Any:
        layout = native.Layout.from_buffer_copy(stock(self, kv_cache))
        layout.k.kind, layout.k.stride = native.ACROSS, kv_cache.shape[3] // 2
        return layout

    return kernel_layout


STEP = "backend.step_planner.NativeStep"
# name -> the place in vllm_relay that is replaced, and by what
PLANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "lse": (STEP, _wrong_native_lse(slice(-1))),
    "context-lse": (STEP, _wrong_native_lse(slice(-1, None))),
    "block": (STEP, _wrong_sequences(_one_block_less)),
    "layout": ("backend.cpu_impl.RelayImpl.kernel_layout", _turned),
    "level": (STEP, _wrong_sequences(_those_of_the_next_group)),
    "window": (STEP, _wrong_score(_one_key_more)),
    "cap": (STEP, _wrong_score(_higher_cap)),
    "slope": (STEP, _wrong_of_layer("slopes", 1.1)),
    "sink": (STEP, _wrong_of_layer("sinks", 1.1)),
    "loads": (
        "backend.continuity.Continuity.new_rows",
        lambda _: lambda self, n: np.zeros(n, bool),
    ),
    "paged-lse": ("backend.cuda_impl.paged_relay", _wrong_paged_lse),
}


_watched = {"reads": 0, "stale": 0, "dropped": 0}
# Of relayed steps: levels -> how many; query tokens of their rows -> how many rows.
_seen: dict[str, dict[int, int]] = {"levels": {}, "queries": {}}


def _watch() -> None:
    """Compare every packed segment with the blocks themselves at the moment it is read."""
    from vllm_relay.backend.packed_cache import PackedCache, Segment

    stock_layer, stock_begin = Segment.layer, PackedCache.begin_step

    def layer(self: Any, name: str, pack: Any) -> Any:
        found, true = stock_layer(self, name, pack), pack(self.block_ids)
        _watched["reads"] += 1
        # A segment may have been cut since this layer was packed: compare what is left.
        _watched["stale"] += not all(
            torch.equal(mine[:, : now.shape[1]], now)
            for mine, now in zip(found.tensors(), true.tensors(), strict=True)
        )
        return found

    def begin_step(self: Any, *args: Any) -> None:
        before = len(self)
        stock_begin(self, *args)
        _watched["dropped"] += before - len(self)

    Segment.layer, PackedCache.begin_step = layer, begin_step


class WorkerExtension(LayerReporter):
    """Methods for ``llm.collective_rpc``."""

    def watch(self, guarded: bool) -> None:
        """Count stale reads from now on; not ``guarded``: with the guard against them taken out."""
        from vllm_relay.backend.packed_cache import PackedCache

        if not guarded:
            PackedCache.begin_step = lambda self, *args: None
        _watch()

    def watch_steps(self) -> None:
        """Count levels and query lengths of relayed steps; find the most that is packed."""
        from vllm_relay.backend.step_planner import StepPlanner

        stock = StepPlanner.plan

        def plan(self: Any, common: Any) -> Any:
            planned = stock(self, common)
            _watched["packed_bytes"] = max(_watched.get("packed_bytes", 0), self.packed.nbytes)
            for found in planned.values():
                if not found.stats.groups:
                    continue
                step = found.step
                starts = step.attention.plan.context.query_start_loc
                grouped = step.attention.plan.index[0][starts[:-1]] >= 0
                seen = {
                    "levels": [len(step.attention.plan.levels)],
                    "queries": np.diff(starts)[grouped],
                }
                for name, values in seen.items():
                    for value in map(int, values):
                        _seen[name][value] = _seen[name].get(value, 0) + 1
            return planned

        StepPlanner.plan = plan

    def counters(self) -> dict[str, float]:
        return metrics.counters()

    def write_counters(self, folder: str) -> None:
        """The counters as a file: of a server's engines, a call returns those of the first only."""
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(metrics.counters()))

    def seen_steps(self) -> dict[str, dict[int, int]]:
        return _seen

    def watched(self) -> dict[str, int]:
        return dict(_watched)

    def packed_bytes(self) -> int:
        """Bytes of the packed segments, all layers."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        return sum(cache.nbytes for cache in {layer.impl.packed for layer in layers})

    def packed(self) -> dict[str, Any]:
        """Of each packed segment, in how many layers it is; and blocks that are pinned."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        (cache,) = {layer.impl.packed for layer in layers}
        layers_of = [len(segment._layers) for segment in cache]
        return {"layers": layers_of, "pinned": sorted(cache._pinned)}

    def scale_weights(self, factor: float) -> None:
        """What a weight update does: other numbers in the same parameters."""
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.mul_(factor)

    def spoil_block(self, name: str, block_id: int) -> None:
        """Negate a layer's keys and values of one block: what a wrong write leaves."""
        layer = self.vllm_config.compilation_config.static_forward_context[name]
        layer.kv_cache[block_id].neg_()

    def wrong_blocks(self, path: str, block_ids: list[int]) -> int:
        """Read blocks back with the backend's layout and count the layers that differ from a
        system-KV file's first tokens and this worker's KV heads."""
        from vllm.distributed import get_tensor_model_parallel_rank

        from vllm_relay.backend.kv_layout import find_layout
        from vllm_relay.system_kv.file import SystemKVFile

        file, wrong = SystemKVFile(path), 0
        context = self.vllm_config.compilation_config.static_forward_context
        for described in file.manifest.layers:
            layer = context[described.name]
            cache, impl = layer.kv_cache, layer.impl
            heads, block_size = cache.shape[1], cache.shape[2]

            def write(k: Any, v: Any, c: Any, s: Any, impl: Any = impl, layer: Any = layer) -> None:
                impl.do_kv_cache_update(layer, k, v, c, s)

            layout = find_layout(write, heads, block_size, impl.head_size, cache.dtype)
            tokens = len(block_ids) * block_size
            rows = [torch.empty(heads, tokens, impl.head_size, dtype=cache.dtype) for _ in range(2)]
            copy_rows(layout, cache, block_ids, *rows)
            # with more workers than heads, each holds the one there is
            first = min(get_tensor_model_parallel_rank() * heads, described.kv_heads - heads)
            for ours, theirs in zip(rows, file.tensors(described.name), strict=True):
                mine = theirs[:tokens, first : first + heads].transpose(0, 1)
                wrong += not torch.equal(ours, mine)
        return wrong

    def plant(self, name: str | None) -> None:
        """Put an error of `PLANTS` into the relay path, or take it out again."""
        mock.patch.stopall()
        if name is not None:
            place, wrong = PLANTS[name]
            stock = pkgutil.resolve_name(f"vllm_relay.{place}")
            mock.patch(f"vllm_relay.{place}", wrong(stock)).start()
