"""The relay backend on vLLM's CPU engine: thin subclasses of vLLM's own ``CPU_ATTN``.

A step with groups runs, per layer, one call of our own kernels: system attention of every level,
the contexts of all requests, and relay fusion. Every other step, and every layer that relay does
not cover, is vLLM's own code on vLLM's own metadata. Requests may have any number of query tokens:
decodes, drafts to verify, prefills.
"""

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_relay import metrics
from vllm_relay.backend.cpu_impl import RelayImpl, RelayMetadata, RelayStep
from vllm_relay.backend.engine_support import engine_refusal
from vllm_relay.backend.fallback import Fallback
from vllm_relay.backend.memory import memory_bound
from vllm_relay.backend.packed_cache import PackedCache, written_blocks
from vllm_relay.config import RelayConfig, only_system_kv
from vllm_relay.ops.native import library as native
from vllm_relay.ops.step.native import NativeStep, partial_bytes
from vllm_relay.plan import SharingStats
from vllm_relay.sharing import Costs, Planner, make_plan, reads, stats_of
from vllm_relay.sharing.cost_store import SHIPPED, cpu_name, find_costs

LEVELS = 3


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


class StepPlanner:
    """Plans the steps of one KV cache group.

    Args:
        layer: the attention of any relayed layer; all have its heads and scale.
        block_size: of the block tables. dtype: of queries and KV.
        costs, max_levels: as `sharing.choose`. packed: the packed segments.
        max_partial_bytes: a step whose partials take more is vLLM's own.
    """

    def __init__(
        self,
        layer: RelayImpl,
        block_size: int,
        dtype: torch.dtype,
        costs: Costs,
        max_levels: int,
        packed: PackedCache,
        max_partial_bytes: float = math.inf,
    ) -> None:
        self.packed = packed
        self._max_partial_bytes = max_partial_bytes
        self._block_size = block_size
        self._costs = costs
        self._planner = Planner(block_size, costs, max_levels)
        self._layer: dict[str, Any] = {
            "heads": layer.num_heads,
            "kv_heads": layer.num_kv_heads,
            "head_size": layer.head_size,
            "dtype": dtype,
            "scale": layer.scale,
        }

    def plan(self, common: Any) -> tuple[RelayStep | None, SharingStats]:
        """One step; ``common``: vLLM's CommonAttentionMetadata. Called for every step.

        Returns:
            None where vLLM's own attention is predicted to be as fast; and what the step shares.
        """
        table = common.block_table_tensor[: common.num_reqs].numpy()
        lens = common.seq_lens[: common.num_reqs].numpy()
        starts = common.query_start_loc[: common.num_reqs + 1].numpy()
        queries = np.diff(starts)
        if self.packed:
            # All of it: whatever else is cut off a step, the engine writes these.
            slots = common.slot_mapping.numpy()
            computed = (lens - queries) // self._block_size
            self.packed.begin_step(table, computed, written_blocks(slots, self._block_size))
        if len(lens) < 2 or common.causal is not True:
            return None, SharingStats(steps=1)
        choice = self._planner.plan(table, lens, queries)
        levels = len(choice.forest.levels)
        heads, head_size = self._layer["heads"], self._layer["head_size"]
        need = int(starts[-1]) * partial_bytes(levels, heads, head_size)
        if not levels or need > self._max_partial_bytes:
            return None, SharingStats(steps=1)
        found = self.packed.of_step(choice, table, self._costs)
        plan = make_plan(choice.forest, table, lens, starts)
        attention = NativeStep(plan, [held is not None for held in found], **self._layer)
        step = RelayStep(plan, [held for held in found if held is not None], attention)
        return step, stats_of(choice.forest, lens)


class RelayMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans each step once: who shares which blocks, and what is left to each request.

    Attributes:
        planner: None where every step of these layers is vLLM's own.
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
        self._bytes_per_token = 0
        self._relayed = False
        self._fallback = Fallback()
        self._scrubbed: list[RelayImpl] = []
        self.planner: StepPlanner | None = None
        try:
            self.planner = self._make_planner(config, vllm_config)
        except Exception as error:
            self._fallback.failed("start", error)

    def _make_planner(self, config: RelayConfig, vllm_config: Any) -> StepPlanner | None:
        # The blocks of block tables and caches. vLLM 0.27 keeps another size in `block_size`.
        block_size, dtype = self.kv_cache_spec.block_size, self.kv_cache_spec.dtype
        for layer in self._layers.values():
            layer.impl.prepare(layer, block_size, dtype)
        if not self._decide(config, vllm_config):
            return None
        served = [impl for impl in self._impls if impl.refusal is None]
        self._bytes_per_token = _kv_elements(served) * dtype.itemsize
        every = get_layers_from_vllm_config(vllm_config, Attention).values()
        of_model = [x.impl for x in every if getattr(x.impl, "refusal", "") is None]
        costs = self._costs_of(served[0], config.min_saved_tokens)
        levels = config.max_levels or LEVELS
        bound = memory_bound(
            vllm_config,
            self.kv_cache_spec.page_size_bytes * len(self._layers),
            partial_bytes(levels, served[0].num_heads, served[0].head_size),
            config.max_copy_gib,
            _kv_elements(served) / _kv_elements(of_model),
        )
        metrics.say_once(
            f"takes at most {bound.total / 2**30:.2f} GiB per worker beside the KV cache for "
            f"{len(served)} of {len(of_model)} layers: {bound.packed / 2**30:.2f} GiB of packed "
            "segments, the rest for partials",
            logging.INFO,
        )
        packed = PackedCache(self._bytes_per_token * block_size, bound.packed)
        for impl in served:
            impl.packed, impl.failed = packed, self.failed
        self._scrubbed = served if config.scrub else []
        metrics.report_at_exit()
        return StepPlanner(served[0], block_size, self.dtype, costs, levels, packed, bound.partials)

    def _decide(self, config: RelayConfig, vllm_config: Any) -> bool:
        """Whether this builder plans at all; says why not, and which layers it leaves to vLLM."""
        refusals = {impl.refusal for impl in self._impls}
        served = {
            (impl.num_heads, impl.num_kv_heads, impl.head_size, impl.scale)
            for impl in self._impls
            if impl.refusal is None
        }
        reason = engine_refusal(vllm_config, self.kv_cache_spec)
        if not config.enabled:
            reason = "switched off by additional_config"
        elif reason is not None:
            pass
        elif not only_system_kv(vllm_config.kv_transfer_config):
            # Connectors write blocks outside forward passes, unseen by `PackedCache`; ours writes
            # them before the first and later only what they held.
            reason = "another KV connector is configured"
        elif len(served) > 1:
            reason = "layers differ in their heads or their scale"
        else:
            # The whole model counts: another builder may relay another KV cache group.
            every = get_layers_from_vllm_config(vllm_config, Attention).values()
            of_model = {x.impl.refusal or "" for x in every if isinstance(x.impl, RelayImpl)}
            if "" not in of_model:
                reason = f"no layer is supported ({', '.join(sorted(of_model)) or 'none found'})"
        if reason is not None:
            metrics.say_once(f"not used: {reason}; vLLM's own CPU attention serves this model")
            return False
        for refusal in sorted(refusal for refusal in refusals if refusal is not None):
            metrics.say_once(f"layers with {refusal} stay on vLLM's own CPU attention")
        return bool(served)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.planner is None:
            return metadata
        try:
            step, stats = self.planner.plan(common_attn_metadata)
            metrics.count_step(stats, self._bytes_per_token)
            self._relay(step is not None)
            if step is None:
                return metadata
            if self._scrubbed:
                step = replace(step, scrubbed=random.choice(self._scrubbed))
            return RelayMetadata(**vars(metadata), relay=step)
        except Exception as error:
            self.failed("planning", error)
            return metadata

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

    def device_name(self) -> str:
        """This machine and its instruction sets, the key of measured costs."""
        return cpu_name(self.isa, native.loaded().isa)

    def _costs_of(self, layer: RelayImpl, min_saved_tokens: int | None) -> Costs:
        """Costs to plan by: KV reads where a setting says so, else predicted time."""
        if min_saved_tokens is not None:
            return reads(min_saved_tokens)
        shape = {
            "heads": layer.num_heads,
            "kv_heads": layer.num_kv_heads,
            "head_size": layer.head_size,
            "device": self.device_name(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
        try:
            found = find_costs(**shape)
        except ValueError as error:
            metrics.say_once(f"{error}; costs shipped with vllm-relay are used")
            found = find_costs(**shape, files=[SHIPPED])
        if found.guessed:
            metrics.say_once(f"{found.source}; `vllm-relay calibrate` measures it")
        return found.costs.with_margin(found.margin)


def _kv_elements(impls: Sequence[RelayImpl]) -> int:
    """Elements of one token's keys and values in some layers."""
    return sum(2 * impl.num_kv_heads * impl.head_size for impl in impls)
