"""What tests do inside the engine's processes: force tokens, plant errors, watch copies.

vLLM loads both classes by name (``logits_processors=``, ``worker_extension_cls=``).
"""

import pkgutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_relay.ops.fusion.native import fuse
from vllm_relay.ops.native import library as native


class ForceTokens(AdapterLogitsProcessor):
    """Makes a request produce ``extra_args["force"]``.

    Logprobs are taken from the logits before that.
    """

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        forced = (params.extra_args or {}).get("force")
        if forced is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = forced[len(output_ids)]
            masked = torch.full_like(logits, -torch.inf)
            masked[token] = 0.0
            return masked

        return force


def _wrong_lse(stock: Any) -> Any:
    def system_attention(*args: Any, **kwargs: Any) -> Any:
        out, lse = stock(*args, **kwargs)
        return out, lse + 0.1

    return system_attention


def _skipped_block(stock: Any) -> Any:
    def system_attention(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        return stock(q, k[128:], v[128:], **kwargs)

    return system_attention


def _wrong_layout(stock: Any) -> Any:
    def system_attention(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        tokens, heads, dim = k.shape
        keys = k.transpose(0, 1).reshape(heads, tokens // 128, 128, dim)
        scrambled = keys.transpose(2, 3).reshape(heads, tokens, dim).transpose(0, 1)
        return stock(q, scrambled, v, **kwargs)

    return system_attention


def _wrong_context_lse(stock: Any) -> Any:
    def attend_with_lse(*args: Any) -> Any:
        out, lse, unknown = stock(*args)
        return out, lse + 0.1, unknown

    return attend_with_lse


def _wrong_paged_lse(stock: Any) -> Any:
    def paged_relay(q: Any, k: Any, v: Any, step: Any, attend: Any, **kwargs: Any) -> Any:
        def wrong(part: Any, *args: Any) -> Any:
            lse = attend(part, *args)
            return lse if part.causal else lse + 0.1

        return stock(q, k, v, step, wrong, **kwargs)

    return paged_relay


def _wrong_level(stock: Any) -> Any:
    def level_attention(q: Any, groups: Any, **kwargs: Any) -> Any:
        if len(groups) < 3:
            return stock(q, groups, **kwargs)
        # each group of a level of several gets the segment of the next
        moved = [(*a[:2], *b[2:]) for a, b in zip(groups, groups[1:] + groups[:1], strict=True)]
        return stock(q, moved, **kwargs)

    return level_attention


def _wrong_sequences(change: Callable[[np.ndarray], None]) -> Callable[[Any], Any]:
    """Our own kernels asked for something else; `change` gets the sequences of segments."""

    def planted(stock: Any) -> Any:
        class Wrong(stock):
            def __init__(self, sequences: np.ndarray, *args: Any, **kwargs: Any) -> None:
                segments = sequences[:, native.CAUSAL] == 0
                wrong = sequences[segments]
                change(wrong)
                sequences = sequences.copy()
                sequences[segments] = wrong
                super().__init__(sequences, *args, **kwargs)

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
            def run(self, query: Any, cache: Any, segments: Any, out: Any) -> None:
                self._lse.fill_(-torch.inf)
                attend, library = self._library.attend, self._library
                with mock.patch.object(library, "attend") as called:
                    super().run(query, cache, segments, out)
                (call,) = called.call_args.args
                call.fused = None
                attend(call)
                self._lse[which] += 0.1
                fuse(list(self._out), list(self._lse), out, self._kept[2])

        return Wrong

    return planted


def _turned(stock: Any) -> Any:
    """Keys of blocks read as if they lay token by token."""

    def for_kernels(self: Any, kv_cache: Any) -> Any:
        layout = stock(self, kv_cache)
        layout.k.kind, layout.k.stride = native.ACROSS, kv_cache.shape[3] // 2
        return layout

    return for_kernels


# name -> what is replaced, by its place in vllm_relay, and by what: in either kind of kernels
SYSTEM, OURS = "ops.attention.op.system_attention", "backend.cpu_native.StepAttention"
PLANTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "lse": {SYSTEM: _wrong_lse, OURS: _wrong_native_lse(slice(-1))},
    "context-lse": {
        "backend.cpu_impl.attend_with_lse": _wrong_context_lse,
        OURS: _wrong_native_lse(slice(-1, None)),
    },
    "block": {SYSTEM: _skipped_block, OURS: _wrong_sequences(_one_block_less)},
    "layout": {SYSTEM: _wrong_layout, "backend.layout.BlockLayout.for_kernels": _turned},
    "level": {
        "backend.cpu_impl.level_attention": _wrong_level,
        OURS: _wrong_sequences(_those_of_the_next_group),
    },
    "paged-lse": {"backend.cuda_impl.paged_relay": _wrong_paged_lse},
}


_watched = {"reads": 0, "stale": 0, "dropped": 0}
# Of relayed steps: levels -> how many; query tokens of their rows -> how many rows.
_seen: dict[str, dict[int, int]] = {"levels": {}, "queries": {}}


def _watch() -> None:
    """Compare every copy of a segment with the blocks themselves at the moment it is read."""
    from vllm_relay.backend.packed_cache import SegmentCopies, SegmentCopy

    stock_layer, stock_begin = SegmentCopy.layer, SegmentCopies.begin_step

    def contents(made: Any) -> list[torch.Tensor]:
        """Keys and values ``[H, elements in the order of tokens]``."""
        if isinstance(made, tuple):
            return [x.flatten(1) for x in made]
        return list(made.tensors())

    def layer(self: Any, name: str, make: Any) -> Any:
        found, true = stock_layer(self, name, make), make()
        _watched["reads"] += 1
        # A copy may have been cut since this layer was made: compare what is left.
        _watched["stale"] += not all(
            torch.equal(mine[:, : now.shape[1]], now)
            for mine, now in zip(contents(found), contents(true), strict=True)
        )
        return found

    def begin_step(self: Any, *args: Any) -> None:
        before = len(self)
        stock_begin(self, *args)
        _watched["dropped"] += before - len(self)

    SegmentCopy.layer, SegmentCopies.begin_step = layer, begin_step


class WorkerExtension:
    """Methods for ``llm.collective_rpc``."""

    def watch(self, guarded: bool) -> None:
        """Count stale reads from now on; not ``guarded``: with the guard against them taken out."""
        from vllm_relay.backend.packed_cache import SegmentCopies

        if not guarded:
            SegmentCopies.begin_step = lambda self, *args: None
        _watch()

    def watch_steps(self) -> None:
        """Count levels and query lengths of relayed steps from now on."""
        from vllm_relay.backend.cpu_torch import TorchSteps

        from vllm_relay.backend.cpu_native import NativeSteps

        def counting(stock: Any) -> Any:
            def make(self: Any, batch: Any, *args: Any) -> Any:
                made = stock(self, batch, *args)
                if made is not None:
                    plan, step = made
                    seen = {"levels": [len(step.levels)], "queries": batch.queries[plan.rows]}
                    for name, values in seen.items():
                        for value in map(int, values):
                            _seen[name][value] = _seen[name].get(value, 0) + 1
                return made

            return make

        for steps in (NativeSteps, TorchSteps):
            steps.make = counting(steps.make)

    def seen_steps(self) -> dict[str, dict[int, int]]:
        return _seen

    def watched(self) -> dict[str, int]:
        return dict(_watched)

    def packed(self) -> dict[str, Any]:
        """Of each packed segment, in how many layers it is; and blocks that are pinned."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        (copies,) = {layer.impl.copies for layer in layers}
        layers_of = [len(segment._layers) for segment in copies]
        return {"layers": layers_of, "pinned": sorted(copies.lasting)}

    def scale_weights(self, factor: float) -> None:
        """What a weight update does: other numbers in the same parameters."""
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.mul_(factor)

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
            layout.copy_rows(cache, block_ids, *rows)
            # with more workers than heads, each holds the one there is
            first = min(get_tensor_model_parallel_rank() * heads, described.kv_heads - heads)
            for ours, theirs in zip(rows, file.tensors(described.name), strict=True):
                mine = theirs[:tokens, first : first + heads].transpose(0, 1)
                wrong += not torch.equal(ours, mine)
        return wrong

    def plant(self, name: str | None) -> None:
        """Put an error of `PLANTS` into the relay path, or take it out again."""
        mock.patch.stopall()
        for place, wrong in PLANTS[name].items() if name is not None else ():
            stock = pkgutil.resolve_name(f"vllm_relay.{place}")
            mock.patch(f"vllm_relay.{place}", wrong(stock)).start()
