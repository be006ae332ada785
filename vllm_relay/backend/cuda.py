"""The relay backend on NVIDIA GPUs: thin subclasses of vLLM's own FlashAttention backend.

A decode step runs, per layer, system attention of each level, context attention and relay fusion
(`ops.paged`), by a plan that kernels make on the GPU (`ops.device_plan`): the host knows neither
block tables nor who shares them. Every call is vLLM's ``flash_attn_varlen_func``, and what it needs
beside tensors (scheduler metadata, splits) comes from vLLM's own builder, asked once per call as
for a batch of its own. Everything else is vLLM's: the KV update, layers that the split does not
cover, steps with prefills.

A step is relayed when the last planned step that the host has heard of had a group. Runner V2 gets
a second set of full CUDA graphs for that choice (`backend.graphs`). Runner V1 has one, with relay
in it, since a graph cannot know what will be shared; a batch that shares nothing then pays for
kernels that return at once. Where a step need not be planned and nothing is shared, most are not.

Not yet run on a GPU.
"""

import copy
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_relay import compat, metrics
from vllm_relay.backend.cuda_graphs import graphs
from vllm_relay.backend.cuda_impl import RelayImpl, RelayMetadata, RelayStep
from vllm_relay.config import RelayConfig
from vllm_relay.ops.planning.device_plan import DevicePlan, Part, Report

# Where nothing is shared, every so many steps are planned to find out whether that has changed.
PROBE_STEPS = 8
# What a plan found decides over steps that are built so many later. By then the device is done with
# it, and no rank of a tensor parallel group decides otherwise than the rest: replaying different
# graphs, they would read each other's buffers.
HEARD_AFTER = 2
# vLLM's default of 32 in graphs takes fp32 [splits, heads, tokens, head size]; a group's queries
# fill more tiles than one row's, so that fewer will do.
SYSTEM_SPLITS = 16
# What a group's system attention, gather and share of fusion take per layer at least, and memory
# bandwidth where the device does not tell it: estimates, until a GPU has measured them. Together
# with the KV bytes of a token they say how many reads a group must save.
GROUP_SECONDS, BANDWIDTH = 20e-6, 2e12
LEVELS = 1


class RelayBackend(FlashAttentionBackend):
    """``--attention-backend relay`` on CUDA."""

    @staticmethod
    def get_name() -> str:
        return "RELAY"

    @staticmethod
    def get_impl_cls() -> type["RelayImpl"]:
        return RelayImpl

    @staticmethod
    def get_builder_cls() -> type["RelayMetadataBuilder"]:
        return RelayMetadataBuilder


class RelayMetadataBuilder(FlashAttentionMetadataBuilder):
    """Plans each decode step once, on the GPU."""

    # vLLM would keep the plan of another block table.
    supports_update_block_table = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # It would move lengths on inside a graph, unseen by the plan (vLLM 0.33).
        self.supports_draft_decode_metadata_update = False
        metrics.set_speaker(vllm_config.parallel_config.rank == 0)
        self._config = RelayConfig.from_additional_config(vllm_config.additional_config)
        scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
        spec_tokens = speculative.num_speculative_tokens if speculative is not None else 0
        self._decode_queries = 1 + (spec_tokens or 0)
        self._most_rows = max(scheduler.max_num_seqs, self.max_cudagraph_size or 0)
        self._most_tokens = self._most_rows * self._decode_queries
        self._longest = vllm_config.model_config.max_model_len
        self._levels = self._config.max_levels or LEVELS
        self._min_saved_tokens = self._worth()
        mode = self.compilation_config.cudagraph_mode
        # Then graphs are captured for prefills, too, and read the plan.
        self._graphs_of_all = self.use_full_cuda_graph and mode.mixed_mode() == mode.FULL
        # Of the last step that was built: was it planned, was something shared as far as known?
        self.planned = self.shared = False
        self._capture = False
        self._builds = self._resting = 0
        # Steps planned lately: number of the build, number of the plan.
        self._pending: deque[tuple[int, int]] = deque()
        self._last = Report()
        self._shapes: set[tuple[int, int]] = set()
        self._plan: DevicePlan | None = None
        self._parts: list[FlashAttentionMetadataBuilder] = []
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self._layers = [x for x in layers.values() if isinstance(x.impl, RelayImpl)]
        impls = [x.impl for x in self._layers]
        self._active = self._decide(vllm_config, impls)
        self._bytes_per_token = sum(
            2 * impl.num_kv_heads * impl.head_size * kv_cache_spec.dtype.itemsize
            for impl in impls
            if impl.refusal is None
        )
        if self._active:
            metrics.report_at_exit()
            graphs.follow(self)
            if self.use_full_cuda_graph and vllm_config.parallel_config.data_parallel_size == 1:
                # Ranks of a data parallel group share different things, and must not replay
                # different graphs where they exchange experts.
                graphs.add_plain()
        if self._active and self._config.overlap and self.device.type == "cuda":
            # Here, since streams are not to be made while a graph is captured.
            RelayImpl.side = torch.cuda.Stream(self.device)

    def _decide(self, vllm_config: Any, impls: list["RelayImpl"]) -> bool:
        """Whether this builder plans at all; says why not, and which layers it leaves to vLLM."""
        parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
        spec = self.kv_cache_spec
        checks = (
            (not self._config.enabled, "switched off by additional_config"),
            (self.dcp_world_size > 1, "decode context parallelism"),
            (parallel.use_ubatching, "two batches in flight (dual-batch overlap)"),
            (vllm_config.cache_config.kv_sharing_fast_prefill, "fast prefill of shared KV layers"),
            (
                # Inside a captured graph a draft model's lengths move on after the plan was made.
                speculative is not None and speculative.method not in compat.DRAFTS_WITHOUT_MODEL,
                "speculative decoding with a draft model",
            ),
            (vllm_config.model_config.is_mm_prefix_lm, "attention both ways over images"),
            (self.rswa_window is not None, "reference sliding window attention"),
            # Whom a request shares with changes how its sums are split.
            (flash_attn.envs.VLLM_BATCH_INVARIANT, "batch invariance is asked for"),
            (getattr(spec, "sliding_window", None) is not None, "a sliding window"),
            (getattr(spec, "attention_chunk_size", None) is not None, "chunked local attention"),
        )
        reason = next((name for applies, name in checks if applies), None)
        if reason is None:
            for impl in impls:
                impl.prepare(
                    self.device,
                    block_size=self.block_size,
                    dtype=spec.dtype,
                    max_seq_len=self._longest,
                    max_num_splits=self.max_num_splits,
                    dense=self._wants_dense(),
                )
            refusals = {impl.refusal for impl in impls}
            if refusals <= {None}:
                return bool(impls)
            named = sorted(refusal for refusal in refusals if refusal is not None)
            if None in refusals:
                for refusal in named:
                    metrics.say_once(f"layers with {refusal} stay on vLLM's own FlashAttention")
                return True
            reason = f"no layer is supported ({', '.join(named)})"
        metrics.say_once(f"not used: {reason}; vLLM's own FlashAttention serves these layers")
        return False

    def _worth(self) -> int:
        """KV token reads that a group has to save per layer."""
        if self._config.min_saved_tokens is not None:
            return self._config.min_saved_tokens
        bandwidth = BANDWIDTH
        if self.device.type == "cuda":
            device = torch.cuda.get_device_properties(self.device)
            # kHz and bits; memory transfers twice per clock
            clock = getattr(device, "memory_clock_rate", 0)
            bandwidth = 250.0 * clock * getattr(device, "memory_bus_width", 0) or BANDWIDTH
        spec = self.kv_cache_spec
        kv_bytes = 2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        return int(GROUP_SECONDS * bandwidth / kv_bytes)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        common = common_attn_metadata
        metadata = super().build(0, common, fast_build)
        self.planned = self.shared = False
        if not self._active or not self._covers(common, fast_build):
            return metadata
        self._builds += 1
        self._hear()
        if self._capture and graphs.capturing_plain():
            return metadata
        if not self._capture and not self._is_due():
            return metadata
        return RelayMetadata(**vars(metadata), relay=self._plan_step(common))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FlashAttentionMetadata:
        """As `build`, for a graph that has to serve steps that share and steps that do not."""
        self._capture = True
        try:
            # Not ours alone: builders of other kinds of attention wrap `build`.
            return self.build(0, common_attn_metadata)
        finally:
            self._capture = False

    def build_for_drafting(
        self, common_attn_metadata: Any, draft_index: int
    ) -> FlashAttentionMetadata:
        """vLLM's own: a draft model's steps are short, and its lengths move on unseen."""
        return self.build(0, common_attn_metadata, fast_build=True)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Never: vLLM's own cascade, which it had before 0.32, cannot be in full graphs."""
        return False

    def _covers(self, common: Any, fast: bool) -> bool:
        """Whether steps like this one are planned, from what is the same at capture and replay."""
        rows = common.num_reqs
        if fast or rows > self._most_rows or common.causal is not True:
            return False
        # The most that a group of so many rows could save.
        if rows < 2 or (rows - 1) * self._longest < self._min_saved_tokens:
            return False
        if common.max_query_len <= self._decode_queries:
            return common.num_actual_tokens <= self._most_tokens
        return self._graphs_of_all and common.num_actual_tokens <= self.max_cudagraph_size

    def _hear(self) -> None:
        """Take note of the newest plan that is old enough."""
        while self._pending and self._pending[0][0] <= self._builds - HEARD_AFTER:
            assert self._plan is not None  # or nothing would be pending
            self._last, _ = self._plan.report(self._pending.popleft()[1])
            metrics.hear_device(self._last)

    def _is_due(self) -> bool:
        """Whether to plan a step, where one that is not planned can be run."""
        if self.use_full_cuda_graph and not graphs.have_both():
            return True
        if self._last.groups:
            self._resting = 0
            return True
        self._resting += 1
        return self._resting % PROBE_STEPS == 1

    def _plan_step(self, common: Any) -> RelayStep:
        rows, tokens = common.num_reqs, common.num_actual_tokens
        table = common.block_table_tensor[:rows]
        if self._plan is None:
            # Not in __init__: vLLM allocates there in the pool that sleep mode empties.
            with torch.inference_mode(False):  # to be written in and outside of it
                self._plan = self._make_plan(table.shape[1])
                self._parts = [
                    *(self._twin(SYSTEM_SPLITS) for _ in range(self._levels)),
                    self._twin(),
                ]
            metrics.follow_device(self._plan.newest, self._bytes_per_token)
        planned = self._plan.update(
            table,
            common.seq_lens[:rows],
            common.query_start_loc[: rows + 1],
            num_tokens=tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            count=not self._capture,
        )
        self._pending.append((self._builds, self._plan.updates - 1))
        *levels, context = (
            self._part(builder, common, part)
            for builder, part in zip(self._parts, [*planned.levels, planned.context], strict=True)
        )
        # Before runner V1 captures a graph it runs the step without telling: the kernels have to be
        # compiled then, since a module cannot be loaded during a capture.
        first = self.use_full_cuda_graph and (rows, tokens) not in self._shapes
        self._shapes.add((rows, tokens))
        self.planned, self.shared = True, self._capture or first or self._last.groups > 0
        return RelayStep(replace(planned, levels=levels, context=context), self.shared)

    def _make_plan(self, columns: int) -> DevicePlan:
        return DevicePlan(
            max_rows=self._most_rows,
            max_tokens=self._most_tokens,
            max_blocks=columns,
            block_size=self.block_size,
            min_saved_tokens=self._min_saved_tokens,
            max_levels=self._levels,
            dense=self._wants_dense() and all(map(_is_dense, self._layers)),
            device=self.device,
        )

    def _wants_dense(self) -> bool:
        wanted = self._config.dense
        return bool(self._config.system_kv.files) if wanted is None else wanted

    def _twin(self, splits: int | None = None) -> FlashAttentionMetadataBuilder:
        """vLLM's builder for one more call per step, with a schedule buffer of its own."""
        twin = copy.copy(self)
        if splits is not None:
            twin.max_num_splits = min(self.max_num_splits, splits)
        buffer = getattr(self, "scheduler_metadata", None)
        if buffer is not None:
            twin.scheduler_metadata = torch.zeros_like(buffer)
        return twin

    @staticmethod
    def _part(builder: FlashAttentionMetadataBuilder, common: Any, part: Part) -> Any:
        """vLLM's metadata of one attention call, made by vLLM's builder."""
        replaced = common.replace(
            query_start_loc=part.query_start_loc,
            seq_lens=part.seq_lens,
            num_reqs=len(part.seq_lens),
            max_query_len=part.max_query_len,
            max_seq_len=part.max_seq_len,
            block_table_tensor=part.block_table,
            causal=part.causal,
        )
        return FlashAttentionMetadataBuilder.build(builder, 0, replaced)


def _is_dense(layer: Any) -> bool:
    """Whether the tokens of block b + 1 follow those of block b in a layer's KV cache."""
    cache = layer.kv_cache
    if not isinstance(cache, torch.Tensor) or cache.dim() != 4:
        return False
    # [blocks, Hkv, block_size, 2 * D]
    return bool(cache.stride(0) == cache.shape[2] * cache.stride(2))
