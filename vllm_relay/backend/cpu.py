"""The relay backend on vLLM's CPU engine: thin subclasses of vLLM's own ``CPU_ATTN``.

A step with groups runs, per layer, one call of our own kernels: system attention of every level,
the contexts of all rows, and relay fusion. Without those kernels it runs system attention per level
with PyTorch's, vLLM's own over what is left of the grouped rows, and fusion; rows in no group go to
vLLM's kernel as they are. Every other step, and every layer that the split does not cover, is
vLLM's own code on vLLM's own metadata. Rows may have any number of query tokens: decodes, drafts to
verify, prefills.
"""

from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_relay import metrics
from vllm_relay.backend.cpu_impl import RelayImpl, RelayMetadata
from vllm_relay.backend.cpu_native import NativeStep, NativeSteps
from vllm_relay.backend.metadata import Batch
from vllm_relay.backend.packed_cache import SegmentCopies, written_blocks
from vllm_relay.config import RelayConfig, only_system_kv
from vllm_relay.ops.native import library as native
from vllm_relay.sharing import Costs, Planner, RelayPlan, reads
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


class RelayMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans each step once: who shares which blocks, and what is left to each row."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        metrics.set_speaker(vllm_config.parallel_config.rank == 0)
        self._config = RelayConfig.from_additional_config(vllm_config.additional_config)
        # The blocks of block tables and caches. vLLM 0.27 keeps another size in `block_size`.
        self._block = kv_cache_spec.block_size
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        for layer in layers.values():
            layer.impl.prepare(layer, self._block, kv_cache_spec.dtype)
        self._impls = [layer.impl for layer in layers.values()]
        self._relayed = False
        self._active = self._decide(vllm_config, self._impls)
        self._bytes_per_token = sum(
            2 * layer.impl.num_kv_heads * layer.impl.head_size * kv_cache_spec.dtype.itemsize
            for layer in layers.values()
            if layer.impl.refusal is None
        )
        self._copies = SegmentCopies(
            max(1, self._bytes_per_token * self._block), int(self._config.max_copy_gib * 2**30)
        )
        self._costs = self._find_costs(self._impls)
        self._planner = Planner(self._block, self._costs, self._config.max_levels or LEVELS)
        served = next((impl for impl in self._impls if impl.refusal is None), None)
        self._steps = NativeSteps(self._block, served, self.dtype)
        if self._active:
            metrics.report_at_exit()
            for impl in self._impls:
                impl.copies = self._copies if impl.refusal is None else None

    def _decide(self, vllm_config: Any, impls: list["RelayImpl"]) -> bool:
        """Whether this builder plans at all; says why not, and which layers it leaves to vLLM."""
        reason = None
        if not self._config.enabled:
            reason = "switched off by additional_config"
        elif not only_system_kv(vllm_config.kv_transfer_config):
            # Connectors write blocks outside forward passes, unseen by `SegmentCopies`; ours writes
            # them before the first and later only what they held.
            reason = "another KV connector is configured"
        else:
            # of the whole model: another builder may relay the layers of another KV cache group
            every = get_layers_from_vllm_config(vllm_config, Attention).values()
            refusals = {x.impl.refusal or "" for x in every if isinstance(x.impl, RelayImpl)}
            if "" not in refusals:
                reason = f"no layer is supported ({', '.join(sorted(refusals)) or 'none found'})"
        if reason is not None:
            metrics.say_once(f"not used: {reason}; vLLM's own CPU attention serves this model")
            return False
        for refusal in sorted({impl.refusal for impl in impls if impl.refusal is not None}):
            metrics.say_once(f"layers with {refusal} stay on vLLM's own CPU attention")
        return any(impl.refusal is None for impl in impls)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._active:
            return metadata
        step = self._plan_step(common_attn_metadata)
        relayed = step is not None
        if relayed != self._relayed:
            self._relayed = relayed
            for impl in self._impls:
                impl.relay(relayed)
        return metadata if step is None else RelayMetadata(**vars(metadata), relay=step)

    def build_for_drafting(
        self, common_attn_metadata: Any, draft_index: int
    ) -> CPUAttentionMetadata:
        """vLLM's own: a draft model's steps are short, and its blocks are not counted twice."""
        return super().build(0, common_attn_metadata, fast_build=True)

    def device_name(self) -> str:
        """This machine and the kernels in use, as costs are kept by."""
        return cpu_name(self.isa, native.loaded().isa)

    def _find_costs(self, impls: list["RelayImpl"]) -> Costs:
        """What the planner goes by: KV reads where a setting says so, else predicted time."""
        least = self._config.min_saved_tokens
        impl = next((impl for impl in impls if impl.refusal is None), None)
        if least is not None or impl is None:
            return reads(least or 0)
        shape = {
            "heads": impl.num_heads,
            "kv_heads": impl.num_kv_heads,
            "head_size": impl.head_size,
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

    def _plan_step(self, common: Any) -> NativeStep | None:
        batch = Batch.of(common)
        if self._copies:
            slots = common.slot_mapping[: common.num_actual_tokens].numpy()
            computed = (batch.lens - batch.queries) // self._block
            self._copies.begin_step(batch.tables, computed, written_blocks(slots, self._block))
        made: tuple[RelayPlan, NativeStep] | None = None
        if len(batch.lens) > 1 and common.causal is True:
            choice = self._planner.plan(batch.tables, batch.lens, batch.queries)
            if choice.forest.levels:
                made = self._steps.make(batch, choice, self._costs, self._copies)
        plan, step = made or (None, None)
        metrics.count_step(plan, self._bytes_per_token)
        return step
