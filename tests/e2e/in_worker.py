"""What tests do inside the engine's processes: force tokens, plant errors, watch copies.

vLLM loads both classes by name (``logits_processors=``, ``worker_extension_cls=``).
"""

import importlib
from typing import Any
from unittest import mock

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


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


# name -> the module of vllm_relay, what of it is replaced, and by what
PLANTS = {
    "lse": ("ops.system", "system_attention", _wrong_lse),
    "context-lse": ("backend.cpu_impl", "attend_with_lse", _wrong_context_lse),
    "block": ("ops.system", "system_attention", _skipped_block),
    "layout": ("ops.system", "system_attention", _wrong_layout),
    "level": ("backend.cpu_impl", "level_attention", _wrong_level),
    "paged-lse": ("backend.cuda_impl", "paged_relay", _wrong_paged_lse),
}


_watched = {"reads": 0, "stale": 0, "dropped": 0}
# Of relayed steps: levels -> how many; query tokens of their rows -> how many rows.
_seen: dict[str, dict[int, int]] = {"levels": {}, "queries": {}}


def _watch() -> None:
    """Compare every copy of a segment with the blocks themselves at the moment it is read."""
    from vllm_relay.backend.copies import SegmentCopies, SegmentCopy

    stock_layer, stock_begin = SegmentCopy.layer, SegmentCopies.begin_step

    def layer(self: Any, name: str, kv_cache: Any, layout: Any, blocks: slice) -> Any:
        found = stock_layer(self, name, kv_cache, layout, blocks)
        fresh = SegmentCopy(self.block_ids, self.start, 0)
        true = stock_layer(fresh, name, kv_cache, layout, blocks)
        _watched["reads"] += 1
        _watched["stale"] += not all(map(torch.equal, found, true))
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
        from vllm_relay.backend.copies import SegmentCopies

        if not guarded:
            SegmentCopies.begin_step = lambda self, *args: None
        _watch()

    def watch_steps(self) -> None:
        """Count levels and query lengths of relayed steps from now on."""
        from vllm_relay.backend.cpu import RelayMetadataBuilder

        stock = RelayMetadataBuilder._step

        def step(self: Any, common: Any, plan: Any, copies: Any, queries: Any) -> Any:
            made = stock(self, common, plan, copies, queries)
            for name, values in (("levels", [len(made.levels)]), ("queries", queries[plan.rows])):
                for value in map(int, values):
                    _seen[name][value] = _seen[name].get(value, 0) + 1
            return made

        RelayMetadataBuilder._step = step

    def seen_steps(self) -> dict[str, dict[int, int]]:
        return _seen

    def watched(self) -> dict[str, int]:
        return dict(_watched)

    def scale_weights(self, factor: float) -> None:
        """What a weight update does: other numbers in the same parameters."""
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.mul_(factor)

    def wrong_blocks(self, path: str, block_ids: list[int]) -> int:
        """Read blocks back with the backend's layout and count the layers that differ from a
        system-KV file's first tokens and this worker's KV heads."""
        from vllm.distributed import get_tensor_model_parallel_rank

        from vllm_relay.backend.layout import find_layout
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
        if name is not None:
            place, attribute, wrong = PLANTS[name]
            module = importlib.import_module(f"vllm_relay.{place}")
            mock.patch.object(module, attribute, wrong(getattr(module, attribute))).start()
