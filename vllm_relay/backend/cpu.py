"""The relay backend on vLLM's CPU engine: thin subclasses of vLLM's own ``CPU_ATTN``.

A step runs, per layer, one call of our own kernels: system attention of every level, the contexts
of all requests, and relay fusion; without groups, the contexts alone. A step for which vLLM's own
attention is predicted to be faster, and every layer that the kernels do not cover, is vLLM's own
code on vLLM's own metadata. Requests may have any number of query tokens: decodes, drafts to
verify, prefills.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_relay import compat, metrics
from vllm_relay.backend.continuity import Continuity, continuity
from vllm_relay.backend.cpu_impl import RelayImpl, RelayMetadata
from vllm_relay.backend.engine_support import engine_refusal
from vllm_relay.backend.fallback import Fallback
from vllm_relay.backend.memory import memory_bound
from vllm_relay.backend.packed_cache import PackedCache
from vllm_relay.backend.step_planner import Planned, StepPlanner
from vllm_relay.calibration.start_up import load_or_measure
from vllm_relay.calibration.steps import Shape, describe
from vllm_relay.config import RelayConfig, only_system_kv
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.ops.step.native import partial_bytes
from vllm_relay.plan import SharingStats
from vllm_relay.sharing import largest_groups, reads

LEVELS = 3
# Tokens of each request behind a shared prefix, in `RelayMetadataBuilder.could_save`.
OWN_TOKENS = 256


class RelayBackend(CPUAttentionBackend):
    """``--attention-backend relay`` on a CPU."""

    @staticmethod
    def get_name() -> str:
        return "RELAY"

    @staticmethod
    def get_impl_cls() -> type["RelayImpl"]:
        return RelayImpl

    @staticmethod
    def get_builder_cls() -> type["RelayMetadataBuilder"]:
        return RelayMetadataBuilder


class RelayMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans each step once: who shares which blocks, and what is left to each request.

    Attributes:
        planner: None where every step of these layers is vLLM's own.
        refusal: why none of its layers is relayed, if not for what each says; None if they are.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        metrics.set_speaker(vllm_config.parallel_config.rank == 0)
        config = RelayConfig.from_additional_config(vllm_config.additional_config)
        self._layers: dict[str, Any] = get_layers_from_vllm_config(
            vllm_config, Attention, layer_names
        )
        self._impls: list[RelayImpl] = [layer.impl for layer in self._layers.values()]
        self._bytes_per_token: dict[AttentionShape, int] = {}
        # Layers whose predictions are seconds, by shape.
        self._timed_layers: Counter[AttentionShape] = Counter()
        self._relayed = False
        self._fallback = Fallback()
        self._scrubbed: list[RelayImpl] = []
        self.planner: StepPlanner | None = None
        self.refusal: str | None = None
        # Ours writes blocks before the first pass and later only what they held. Others load KV
        # into them between passes.
        self._connected = not only_system_kv(vllm_config.kv_transfer_config)
        self._continuity: Continuity | None = None
        try:
            if self._connected:
                self._continuity = continuity(compat.worker().model_runner)
            self.planner = self._make_planner(config, vllm_config)
        except Exception as error:
            self.refusal = "its start failed"
            self._fallback.failed("start", error)

    def _make_planner(self, config: RelayConfig, vllm_config: Any) -> StepPlanner | None:
        # The blocks of block tables and caches. vLLM 0.27 keeps another size in `block_size`.
        block_size, dtype = self.kv_cache_spec.block_size, self.kv_cache_spec.dtype
        for layer in self._layers.values():
            layer.impl.prepare(layer, block_size, dtype)
        if not self._decide(config, vllm_config):
            return None
        served = [impl for impl in self._impls if impl.shape is not None]
        layer_of = {x.impl.shape: x for x in self._layers.values() if x.impl.shape is not None}
        shapes = list(layer_of)
        self._bytes_per_token = {
            shape: _kv_bytes(x for x in served if x.shape == shape) for shape in shapes
        }
        every = get_layers_from_vllm_config(vllm_config, Attention).values()
        of_model = [x.impl for x in every if getattr(x.impl, "shape", None) is not None]
        levels = config.max_levels or LEVELS
        bound = memory_bound(
            vllm_config,
            self.kv_cache_spec.page_size_bytes * len(self._layers),
            max(partial_bytes(levels, shape.heads, shape.head_size) for shape in shapes),
            config.max_copy_gib,
            _kv_bytes(served) / _kv_bytes(of_model),
        )
        metrics.say_once(
            f"takes at most {bound.total / 2**30:.2f} GiB per worker beside the KV cache for "
            f"{len(served)} of {len(of_model)} layers, on kernels for {native.loaded().isa}: "
            f"{bound.packed / 2**30:.2f} GiB of packed segments, the rest for partials",
            logging.INFO,
        )
        packed = PackedCache(sum(self._bytes_per_token.values()) * block_size, bound.packed)
        for impl in served:
            impl.packed, impl.failed = packed, self.failed
        self._scrubbed = served if config.scrub else []
        metrics.report_at_exit()
        metrics.follow_packed(packed)
        # KV reads where a setting says so, else predicted time.
        least = config.min_saved_tokens
        if least is None:
            self._timed_layers = Counter(impl.shape for impl in served if impl.shape is not None)
        costs = {
            shape: load_or_measure(self, layer, shape) if least is None else reads(least)
            for shape, layer in layer_of.items()
        }
        return StepPlanner(costs, block_size, levels, packed, bound.partials, self._continuity)

    def _decide(self, config: RelayConfig, vllm_config: Any) -> bool:
        """Whether this builder plans at all; says why not, and which layers it leaves to vLLM."""
        refusals = {impl.refusal for impl in self._impls}
        reason = engine_refusal(vllm_config, self.kv_cache_spec)
        if not config.enabled:
            reason = "switched off by additional_config"
        elif reason is not None:
            pass
        elif self._connected and self._continuity is None:
            reason = "another KV connector is configured, and the runner does not say what it loads"
        else:
            # The whole model counts: another builder may relay another KV cache group.
            every = get_layers_from_vllm_config(vllm_config, Attention).values()
            of_model = {x.impl.refusal or "" for x in every if isinstance(x.impl, RelayImpl)}
            if "" not in of_model:
                reason = f"no layer is supported ({', '.join(sorted(of_model)) or 'none found'})"
        self.refusal = reason
        if reason is not None:
            metrics.say_once(f"not used: {reason}; vLLM's own CPU attention serves these layers")
            return False
        for refusal in sorted(refusal for refusal in refusals if refusal is not None):
            metrics.say_once(f"layers with {refusal} stay on vLLM's own CPU attention")
        return None in refusals

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.planner is None:
            return metadata
        try:
            started = time.perf_counter()
            planned = self.planner.plan(common_attn_metadata)
            self._count(planned, time.perf_counter() - started)
            self._relay(bool(planned))
            if not planned:
                return metadata
            steps = {shape: found.step for shape, found in planned.items()}
            if self._scrubbed:
                layer = random.choice(self._scrubbed)
                assert layer.shape is not None
                if layer.shape in steps:
                    steps[layer.shape] = replace(steps[layer.shape], scrubbed=layer)
            return RelayMetadata(**vars(metadata), relay=steps)
        except Exception as error:
            self.failed("planning", error)
            return metadata

    def could_save(self, rows: int, tokens: int) -> bool:
        """True if so many decodes form a group over so many tokens, each with `OWN_TOKENS` more."""
        step = describe(Shape(rows, tokens, OWN_TOKENS), self.kv_cache_spec.block_size)
        planned = {} if self.planner is None else self.planner.plan(step)
        return any(found.stats.groups for found in planned.values())

    def _count(self, planned: Mapping[AttentionShape, Planned], seconds: float) -> None:
        """Count a step as that of the shape that shares most; ``seconds``: of planning."""
        most = max(planned.values(), key=lambda found: found.stats.tokens_saved, default=None)
        stats = most.stats if most else SharingStats(steps=1)
        metrics.count_step(
            replace(stats, steps_ungrouped=int(bool(planned) and not stats.groups)),
            sum(x.stats.tokens_saved * self._bytes_per_token[k] for k, x in planned.items()),
            sum(x.saved * self._timed_layers[k] for k, x in planned.items()),
            seconds,
        )
        metrics.show_groups(self, partial(largest_groups, most.forest) if most else None)

    def _relay(self, relayed: bool) -> None:
        if relayed != self._relayed:
            self._relayed = relayed
            for impl in self._impls:
                impl.relay(relayed)

    def failed(self, doing: str, error: Exception) -> None:
        """Leave what failed to vLLM's own attention, and all steps after several failures."""
        self._fallback.failed(doing, error)
        if self.planner is not None:
            self.planner.packed.clear()  # writes of this step may have gone unseen
        if self._fallback.off:
            self.planner = None
            for impl in self._impls:
                impl.packed = None  # nor are system KVs packed again
            self._relay(False)

    def build_for_drafting(
        self, common_attn_metadata: Any, draft_index: int
    ) -> CPUAttentionMetadata:
        """vLLM's own: a draft model's steps are short, and its blocks are not counted twice."""
        return super().build(0, common_attn_metadata, fast_build=True)


def _kv_bytes(impls: Iterable[RelayImpl]) -> int:
    """Bytes of one token's keys and values in some layers."""
    shapes = [impl.shape for impl in impls if impl.shape is not None]
    return sum(2 * x.kv_heads * x.head_size * x.dtype.itemsize for x in shapes)
