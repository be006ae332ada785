"""The relay backend on NVIDIA GPUs: thin subclasses of vLLM's FlashAttention backend.

A step is planned once, by kernels on the GPU (`DevicePlan`): the host knows neither block
tables nor who shares them. Each layer then runs system attention per level, context attention and
relay fusion (`paged_relay`), all with vLLM's ``flash_attn_varlen_func``. KV updates, layers that
the split does not cover, and steps with large prefills are vLLM's.

A step is relayed if the last planned step that the host has heard of had a group. Runner V2 has a
second set of full CUDA graphs for that choice (`backend.cuda_graphs`). Runner V1 has one set, with
relay in it: a graph cannot know what will be shared, so a batch that shares nothing pays for
kernels that return at once. A step that needs no plan is seldom planned while nothing is shared.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_relay import metrics
from vllm_relay.backend import cuda_support, self_test
from vllm_relay.backend.cuda_graphs import graphs
from vllm_relay.backend.cuda_history import SharingHistory
from vllm_relay.backend.cuda_impl import RelayImpl, RelayMetadata, Schedules
from vllm_relay.backend.fallback import Fallback
from vllm_relay.config import RelayConfig
from vllm_relay.ops.planning.device_plan import DevicePlan
from vllm_relay.plan import Plan

LEVELS = 1
# Query tokens of the largest step with a prefill that is relayed: its queries and partials take
# memory that vLLM has not seen when it sized the KV cache.
MIXED_TOKENS = 2048


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
    """Plans each step once, on the GPU.

    Attributes:
        layers: the target model's, of the group, with a `RelayImpl`. fa_versions: theirs.
        refusal: why none of them is relayed, if not for what each says; None if they are.
        planned: the last step was planned. shared: its layers are to be relayed.
        device_plan: made with the first planned step. history: what the planned steps shared.
    """

    # vLLM would keep the plan of another block table.
    supports_update_block_table = False
    refusal: str | None = None

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        metrics.set_speaker(vllm_config.parallel_config.rank == 0)
        self._config = RelayConfig.from_additional_config(vllm_config.additional_config)
        scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
        self._decode_queries = 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)
        self._max_rows = max(scheduler.max_num_seqs, self.max_cudagraph_size or 0)
        self._max_tokens = max(self._max_rows * self._decode_queries, MIXED_TOKENS)
        self._max_seq_len = vllm_config.model_config.max_model_len
        self._levels = self._config.max_levels or LEVELS
        dense, files = self._config.dense, self._config.system_kv.files
        self._dense = bool(files) if dense is None else dense
        mode = self.compilation_config.cudagraph_mode
        # Then graphs are captured for prefills, too, and read the plan.
        self._graphs_of_all = self.use_full_cuda_graph and mode.mixed_mode() == mode.FULL
        self.planned = self.shared = self._capture = False
        self.device_plan: DevicePlan | None = None
        self._schedules: Schedules | None = None
        self.history = SharingHistory()
        self._shapes: set[tuple[int, int]] = set()
        self._fallback = Fallback()
        every = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        ours = {name: x for name, x in every.items() if isinstance(x.impl, RelayImpl)}
        self.layers = cuda_support.target_layers(ours, vllm_config)
        if self.layers:
            # It would move lengths on inside a graph, unseen by the plan (vLLM 0.33).
            self.supports_draft_decode_metadata_update = False
        self.fa_versions = {layer.impl.vllm_flash_attn_version for layer in self.layers}
        self._active = False
        try:
            self._active = self._start(vllm_config)
        except Exception as error:
            self.refusal = "its start failed"
            self._fallback.failed("start", error)

    def _start(self, vllm_config: VllmConfig) -> bool:
        """True if this builder plans. What is raised here is raised on every rank."""
        if not self._decide(vllm_config):
            return False
        self._min_saved_tokens, self._min_saved_outside = cuda_support.minimums(self, self._config)
        self._window = cuda_support.least_window(self.layers)
        if self._window and not self.could_save(self._max_rows, self._window):
            self.refusal = f"a window of {self._window} tokens saves too little to be relayed"
            metrics.say_once(self.refusal)
            return False
        for layer in self.layers:
            layer.impl.failed = self.failed
        metrics.report_at_exit()
        graphs.follow(self)
        if self.use_full_cuda_graph and vllm_config.parallel_config.data_parallel_size == 1:
            # Ranks of a data parallel group share different things, and must not replay different
            # graphs where they exchange experts.
            graphs.add_plain()
        if self._config.overlap and self.device.type == "cuda":
            # Here: no stream may be made while a graph is captured.
            RelayImpl.side = torch.cuda.Stream(self.device)
        return True

    def _decide(self, vllm_config: VllmConfig) -> bool:
        """True if this builder plans; logs why not, and which layers stay on vLLM's path."""
        reason = cuda_support.refusal(self, vllm_config, self._config)
        if reason is None:
            impls = [layer.impl for layer in self.layers]
            for impl in impls:
                impl.refusal = impl.refusal or self_test.refusal(
                    impl,
                    self.device,
                    block_size=self.block_size,
                    dtype=vllm_config.model_config.dtype,
                    max_seq_len=self._max_seq_len,
                    max_num_splits=self.max_num_splits,
                    dense=self._dense,
                )
            cuda_support.agree(impls, vllm_config)
            refusals = sorted({impl.refusal for impl in impls if impl.refusal is not None})
            if not impls or any(impl.refusal is None for impl in impls):
                for refusal in refusals:
                    metrics.say_once(f"layers with {refusal} stay on vLLM's own FlashAttention")
                return bool(impls)
            reason = f"no layer is supported ({', '.join(refusals)})"
        self.refusal = reason
        metrics.say_once(f"not used: {reason}; vLLM's own FlashAttention serves these layers")
        return False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        common = common_attn_metadata
        metadata = super().build(0, common, fast_build)
        self.planned = self.shared = False
        if not self._active or not self._covers(common, fast_build):
            return metadata
        try:
            plan = self._plan_step(common) if self._wanted(common) else None
            return RelayMetadata(**vars(metadata), plan=plan) if self.shared else metadata
        except Exception as error:
            alone = self.vllm_config.parallel_config.tensor_parallel_size == 1
            if self._must_plan and not (alone and self._is_mixed(common)):
                raise  # ranks have to plan alike, to decide alike
            self.planned = self.shared = False
            self.failed("planning", error)
            return metadata

    @property
    def _graphs_need_plans(self) -> bool:
        """True if the only graphs have relay in them: what they replay is the plan."""
        return self.use_full_cuda_graph and not graphs.have_both

    @property
    def _must_plan(self) -> bool:
        """True if no step can be left unplanned: ranks that reduce together replay one graph."""
        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        return self._graphs_need_plans or (self.use_full_cuda_graph and ranks > 1)

    def _is_mixed(self, common: CommonAttentionMetadata) -> bool:
        """True if a step has a prefill, and is in no full graph."""
        return common.max_query_len > self._decode_queries and not self._graphs_of_all

    def _wanted(self, common: CommonAttentionMetadata) -> bool:
        """True if this step is planned."""
        self.history.begin_step(self.device_plan)
        if self._capture:
            return not graphs.capturing_plain
        if self._is_mixed(common):
            pays = self.history.shared and self.history.saved >= self._min_saved_outside
            return pays or self.history.is_due_beside_prefills()
        return self._graphs_need_plans or self.history.is_due() or graphs.sharing

    def failed(self, doing: str, error: Exception) -> None:
        """Leave what failed to vLLM's own attention, and all steps after several failures."""
        self._fallback.failed(doing, error)
        self._active = not self._fallback.off or self._must_plan

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttentionMetadata:
        """`build` for a graph, which serves steps that share and steps that do not."""
        self._capture = True
        try:
            # Builders of other kinds of attention override `build` alone.
            return self.build(0, common_attn_metadata)
        finally:
            self._capture = False

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> FlashAttentionMetadata:
        """vLLM's own: a draft model's steps are short, and its lengths move on unseen."""
        return self.build(0, common_attn_metadata, fast_build=True)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """False: vLLM's own cascade, which it had before 0.32, cannot be in full graphs."""
        return False

    def _covers(self, common: CommonAttentionMetadata, fast: bool) -> bool:
        """True if steps like this one are planned; depends on what capture and replay share."""
        rows = common.num_reqs
        if fast or rows > self._max_rows or common.causal is not True:
            return False
        if not self.could_save(rows, self._max_seq_len):
            return False
        if self._is_mixed(common):
            # FlashAttention 4 would compile for many queries while requests wait.
            return common.num_actual_tokens <= MIXED_TOKENS and 4 not in self.fa_versions
        if common.max_query_len <= self._decode_queries:
            return common.num_actual_tokens <= self._max_tokens
        return common.num_actual_tokens <= self.max_cudagraph_size

    def could_save(self, rows: int, tokens: int) -> bool:
        """True if so many requests could save enough: all share all of so many tokens."""
        return rows >= 2 and (rows - 1) * tokens >= self._min_saved_tokens

    def _plan_step(self, common: CommonAttentionMetadata) -> Plan[Tensor] | None:
        """The step's plan; None if it is a probe, whose numbers alone are of use."""
        rows, tokens = common.num_reqs, common.num_actual_tokens
        table = common.block_table_tensor[:rows]
        if self.device_plan is None or self._schedules is None:
            # Not in __init__: vLLM allocates there in the pool that sleep mode empties.
            with torch.inference_mode(False):  # written in and outside of it
                self.device_plan = self._make_device_plan(table.shape[1])
                self._schedules = Schedules(self, self._levels)
        plan = self.device_plan.update(
            table,
            common.seq_lens[:rows],
            common.query_start_loc[: rows + 1],
            num_tokens=tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            count=not self._capture,
        )
        self.history.add(self.device_plan)
        # Runner V1 runs a step before it captures its graph, without telling: kernels have to be
        # compiled then, since no module can be loaded during a capture.
        in_graph = self.use_full_cuda_graph and not self._is_mixed(common)
        captured = in_graph and tokens <= self.max_cudagraph_size  # None without graphs
        first = captured and (rows, tokens) not in self._shapes
        self._shapes.add((rows, tokens))
        self.planned, self.shared = True, self._capture or first or self.history.shared
        if self.shared or self._graphs_need_plans or graphs.several:
            return self._schedules.add(plan, common)
        return None

    def _make_device_plan(self, columns: int) -> DevicePlan:
        impls = [layer.impl for layer in self.layers if layer.impl.refusal is None]
        plan = DevicePlan(
            max_rows=self._max_rows,
            max_tokens=self._max_tokens,
            max_blocks=columns,
            block_size=self.block_size,
            min_saved_tokens=self._min_saved_tokens,
            max_levels=self._levels,
            window=self._window,
            dense=self._dense
            and all(cuda_support.has_consecutive_blocks(layer.kv_cache) for layer in self.layers),
            device=self.device,
        )
        kv_elements = sum(2 * impl.num_kv_heads * impl.head_size for impl in impls)
        metrics.follow_device(plan.newest, kv_elements * self.kv_cache_spec.dtype.itemsize)
        return plan
