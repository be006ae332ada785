"""The relay backend on vLLM's CPU engine: thin subclasses of vLLM's own ``CPU_ATTN``.

A decode step with a group runs, per layer: system attention per group, vLLM's own kernel over what
is left of the grouped rows, and relay fusion of the two; rows in no group go to vLLM's kernel as
they are. Every other step, and every layer that the split does not cover, is vLLM's own code on
vLLM's own metadata.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_relay import metrics
from vllm_relay.backend.copies import SegmentCopies, SegmentCopy, written_blocks
from vllm_relay.backend.layout import BlockLayout, find_layout
from vllm_relay.backend.metadata import GroupStep, RelayStep
from vllm_relay.backend.sink_lse import (
    attend_with_lse,
    give_heads_twice,
    part_both,
    sinks_for_both,
)
from vllm_relay.config import RelayConfig, only_system_kv
from vllm_relay.ops import relay_fusion, system_attention
from vllm_relay.sharing import (
    Forest,
    Group,
    RelayPlan,
    Segment,
    find_forest,
    make_plan,
    select,
)


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


@dataclass
class RelayMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a step that is relayed; other steps carry vLLM's own class."""

    relay: RelayStep | None = None


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
        self._active = self._decide(vllm_config, [layer.impl for layer in layers.values()])
        self._bytes_per_token = sum(
            2 * layer.impl.num_kv_heads * layer.impl.head_size * kv_cache_spec.dtype.itemsize
            for layer in layers.values()
            if layer.impl.refusal is None
        )
        self._copies = SegmentCopies(
            max(1, self._bytes_per_token * self._block), int(self._config.max_copy_gib * 2**30)
        )
        # vLLM's builder plans its kernel's work for a number of query heads.
        self._twice_the_heads: CPUAttentionMetadataBuilder | None = copy.copy(self)
        self._twice_the_heads.num_heads = 2 * self.num_heads
        if self._active:
            metrics.report_at_exit()

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
        return metadata if step is None else RelayMetadata(**vars(metadata), relay=step)

    def build_for_drafting(
        self, common_attn_metadata: Any, draft_index: int
    ) -> CPUAttentionMetadata:
        """vLLM's own: a draft model's steps are short, and its blocks are not counted twice."""
        return super().build(0, common_attn_metadata, fast_build=True)

    def _plan_step(self, common: Any) -> RelayStep | None:
        rows = common.num_reqs
        table = common.block_table_tensor[:rows].numpy()
        lens = common.seq_lens[:rows].numpy()
        if self._copies:
            starts = common.query_start_loc[: rows + 1].numpy()
            slots = common.slot_mapping[: common.num_actual_tokens].numpy()
            computed = (lens - np.diff(starts)) // self._block
            self._copies.begin_step(table, computed, written_blocks(slots, self._block))
        step, plan = None, None
        if rows > 1 and common.max_query_len == 1 and common.causal is True:
            forest, copies = self._find_groups(table, lens)
            plan = make_plan(forest, table, lens)
            if plan is not None:
                step = self._step(common, plan, copies)
        metrics.count_step(plan, self._bytes_per_token)
        return step

    def _find_groups(self, table: np.ndarray, lens: np.ndarray) -> tuple[Forest, list[SegmentCopy]]:
        """The groups to relay, cut to what the copies' bound allows, and their copies."""
        forest = find_forest(table, np.maximum(lens - 1, 0), self._block)
        forest = select(forest, min_saved_tokens=self._config.min_saved_tokens)
        assert len(forest.levels) <= 1
        groups: list[Group] = []
        copies: list[SegmentCopy] = []
        for group in (group for level in forest.levels for group in level):
            blocks = table[group.rows[0], : group.segment.blocks]
            found = self._copies.get(blocks, in_use=copies)
            if found is None or found[1] < len(blocks):
                metrics.say_once("shared segments are cut to what max_copy_gib allows")
            if found is not None:
                copies.append(found[0])
                groups.append(Group(Segment(0, found[1]), group.rows))
        level = (tuple(groups),) if groups else ()
        return Forest(level, forest.num_rows, forest.block_size), copies

    def _step(self, common: Any, plan: RelayPlan, copies: list[SegmentCopy]) -> RelayStep:
        level = plan.levels[0]
        groups = (
            GroupStep(int(begin), int(end), int(tokens) // self._block, segment)
            for begin, end, tokens, segment in zip(
                level.cu_rows[:-1], level.cu_rows[1:], level.seq_lens, copies, strict=True
            )
        )
        tables, lens = plan.context_block_table, plan.context_lens
        everything = np.arange(common.num_reqs)
        loners = np.setdiff1d(everything, plan.rows, assume_unique=True)
        whole = np.array_equal(plan.rows, everything)
        context, heads_twice = self._context(common, tables[plan.rows], lens[plan.rows])
        return RelayStep(
            rows=None if whole else torch.from_numpy(plan.rows).long(),
            groups=tuple(groups),
            context=context,
            heads_twice=heads_twice,
            loners=torch.from_numpy(loners),
            rest=self._part(self, common, tables[loners], lens[loners]) if len(loners) else None,
        )

    def _context(
        self, common: Any, tables: np.ndarray, lens: np.ndarray
    ) -> tuple[CPUAttentionMetadata, bool]:
        """vLLM's metadata of the grouped rows' contexts; whether it is for heads given twice."""
        if self._twice_the_heads is not None:
            try:
                return self._part(self._twice_the_heads, common, tables, lens), True
            except RuntimeError:
                # With AMX vLLM's kernel refuses more than 16 query heads per KV head.
                self._twice_the_heads = None
        return self._part(self, common, tables, lens), False

    @staticmethod
    def _part(
        builder: CPUAttentionMetadataBuilder, common: Any, tables: np.ndarray, lens: np.ndarray
    ) -> CPUAttentionMetadata:
        """vLLM's metadata for decode rows with these tables and lengths, made by vLLM's builder."""
        rows = len(lens)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        part = common.replace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(lens),
            num_reqs=rows,
            num_actual_tokens=rows,
            max_seq_len=int(lens.max()),
            block_table_tensor=torch.from_numpy(tables),
        )
        return CPUAttentionMetadataBuilder.build(builder, 0, part)


class RelayImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention of one layer, with the relay path in front of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refusal = self._refusal()
        self._layout: BlockLayout | None = None

    def _refusal(self) -> str | None:
        """What about this layer the split does not cover, or None."""
        checks = (
            (self.attn_type != AttentionType.DECODER, f"{self.attn_type} attention"),
            (self.sliding_window > 0, "a sliding window"),
            (self.alibi_slopes is not None, "ALiBi"),
            (bool(self.logits_soft_cap), "a logits soft cap"),
            (self.sinks is not None, "attention sinks"),
            (self.kv_cache_dtype != "auto", f"a {self.kv_cache_dtype} KV cache"),
        )
        return next((name for applies, name in checks if applies), None)

    def prepare(self, layer: Any, block_size: int, dtype: torch.dtype) -> None:
        """Find how the engine lays out this layer's blocks.

        The layer is left to vLLM when that fails.
        """
        if dtype == torch.float16:
            # Its range is too small for `sink_lse`.
            self.refusal = self.refusal or "float16"
        if self.refusal is None:
            self._layout = find_layout(
                lambda key, value, cache, slots: self.do_kv_cache_update(
                    layer, key, value, cache, slots
                ),
                self.num_kv_heads,
                block_size,
                self.head_size,
                dtype,
            )
            if self._layout is None:
                self.refusal = "a KV layout that relay cannot read"

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As vLLM's: query, output ``[T, Hq, D]``, cache ``[blocks, Hkv, block_size, 2 * D]``."""
        step = attn_metadata.relay if isinstance(attn_metadata, RelayMetadata) else None
        if step is None or self.refusal is not None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        if step.rest is not None:
            q = query[step.loners]  # for key and value too, see `_context_attention`
            rest = torch.empty_like(q)
            output[step.loners] = super().forward(layer, q, q, q, kv_cache, step.rest, rest)
        rows = slice(0, step.context.num_actual_tokens) if step.rows is None else step.rows
        output[rows] = self._relay(layer, query[rows], kv_cache, step)
        return output

    def _relay(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: RelayStep
    ) -> torch.Tensor:
        """Attention of the grouped rows, ``[N, Hq, D]`` in relay order, from two partials."""
        assert self._layout is not None  # or the layer would be refused
        system = [
            system_attention(
                query[group.begin : group.end],
                *group.copy.layer(layer.layer_name, kv_cache, self._layout, group.num_blocks),
                scale=self.scale,
            )
            for group in step.groups
        ]
        system_out = torch.cat([out for out, _ in system]) if len(system) > 1 else system[0][0]
        system_lse = torch.cat([lse for _, lse in system], 1) if len(system) > 1 else system[0][1]
        out, lse = self._context_attention(layer, query, kv_cache, step, system_out, system_lse)
        return relay_fusion([system_out, out], [system_lse, lse])

    def _context_attention(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: RelayStep,
        system_out: torch.Tensor,
        system_lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The context partial of the grouped rows, from vLLM's kernel: ``[N, Hq, D], [Hq, N]``."""
        with_sinks = copy.copy(self)

        def kernel(impl: RelayImpl, query: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(query)
            # query stands in for key and value, which vLLM's decoder path does not read: they are
            # in the cache already
            return CPUAttentionBackendImpl.forward(
                impl, layer, query, query, query, kv_cache, step.context, out
            )

        def attend(sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not step.heads_twice:
                with_sinks.sinks = sinks
                return kernel(self, query), kernel(with_sinks, query)
            with_sinks.sinks = sinks_for_both(sinks, self.num_kv_heads)
            twice = give_heads_twice(query, self.num_kv_heads)
            return part_both(kernel(with_sinks, twice), self.num_kv_heads)

        out, lse, unknown = attend_with_lse(attend, system_lse)
        if unknown.any():
            # A head that is empty in both partials stays empty whatever the weights.
            empty = unknown & ~system_out.any(-1).T
            lse.masked_fill_(empty, -torch.inf)
            unknown &= ~empty
            for row in unknown.any(0).nonzero().flatten().tolist():
                lse[:, row] = self._exact_context_lse(query[row], kv_cache, step.context, row)
        return out, lse

    def _exact_context_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: CPUAttentionMetadata, row: int
    ) -> torch.Tensor:
        """LSE ``[Hq]`` of one row's context from its own blocks, copied row by row."""
        assert self._layout is not None
        tokens = int(metadata.seq_lens[row])
        block_size = kv_cache.shape[2]
        blocks = metadata.block_table[row, : -(-tokens // block_size)].tolist()
        keys = kv_cache.new_empty(self.num_kv_heads, len(blocks) * block_size, self.head_size)
        values = torch.empty_like(keys)
        self._layout.copy_rows(kv_cache, blocks, keys, values)
        keys, values = (x[:, :tokens].transpose(0, 1) for x in (keys, values))
        return system_attention(query[None], keys, values, scale=self.scale)[1][:, 0]
