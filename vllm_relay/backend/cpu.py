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
from vllm_relay.backend.copies import SegmentCopies, written_blocks
from vllm_relay.backend.layout import BlockLayout, find_layout
from vllm_relay.backend.metadata import GroupStep, RelayStep
from vllm_relay.backend.sink_lse import (
    attend_with_lse,
    give_heads_twice,
    part_both,
    sinks_for_both,
)
from vllm_relay.config import RelayConfig
from vllm_relay.ops import relay_fusion, system_attention
from vllm_relay.sharing import Forest, RelayPlan, find_forest, make_plan, select


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
        self._config = RelayConfig.from_additional_config(vllm_config.additional_config)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        if self._config.enabled:
            for layer in layers.values():
                layer.impl.prepare(layer, self.block_size, kv_cache_spec.dtype)
        self._active = self._decide(vllm_config, [layer.impl for layer in layers.values()])
        relayed = (
            [x.impl for x in layers.values() if x.impl.refusal is None] if self._active else []
        )
        self._bytes_per_token = sum(
            2 * impl.num_kv_heads * impl.head_size * kv_cache_spec.dtype.itemsize
            for impl in relayed
        )
        self._copies = SegmentCopies(
            self._bytes_per_token * self.block_size, int(self._config.max_copy_gib * 2**30)
        )
        # vLLM's builder plans its kernel's work for a number of query heads.
        self._twice_the_heads = copy.copy(self)
        self._twice_the_heads.num_heads = 2 * self.num_heads
        if self._active:
            metrics.report_at_exit(speak=vllm_config.parallel_config.rank == 0)

    def _decide(self, vllm_config: Any, impls: list["RelayImpl"]) -> bool:
        """Whether this builder plans at all; says why not, and which layers it leaves to vLLM."""
        refusals = sorted({impl.refusal for impl in impls if impl.refusal is not None})
        reason = None
        if not self._config.enabled:
            reason = "switched off by additional_config"
        elif vllm_config.kv_transfer_config is not None:
            # Connectors write blocks outside forward passes, unseen by `SegmentCopies`.
            reason = "a KV connector is configured"
        elif all(impl.refusal is not None for impl in impls):
            reason = f"no layer is supported ({', '.join(refusals) or 'none has attention'})"
        if reason is not None:
            metrics.say_once(f"not used: {reason}; vLLM's own CPU attention serves these layers")
        elif refusals:
            metrics.say_once(f"layers with {', '.join(refusals)} stay on vLLM's own CPU attention")
        return reason is None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._active:
            return metadata
        step = self._plan_step(common_attn_metadata)
        return metadata if step is None else RelayMetadata(**vars(metadata), relay=step)

    def _plan_step(self, common: Any) -> RelayStep | None:
        rows = common.num_reqs
        table = common.block_table_tensor[:rows].numpy()
        lens = common.seq_lens[:rows].numpy()
        if self._copies:
            starts = common.query_start_loc[: rows + 1].numpy()
            slots = common.slot_mapping[: common.num_actual_tokens].numpy()
            computed = (lens - np.diff(starts)) // self.block_size
            self._copies.begin_step(table, computed, written_blocks(slots, self.block_size))
        plan = None
        if rows > 1 and common.max_query_len == 1 and common.causal is True:
            plan = self._find_plan(table, lens)
        metrics.count_step(plan, self._bytes_per_token)
        return None if plan is None else self._step(common, plan)

    def _find_plan(self, table: np.ndarray, lens: np.ndarray) -> RelayPlan | None:
        forest = find_forest(table, np.maximum(lens - 1, 0), self.block_size)
        forest = select(forest, min_saved_tokens=self._config.min_saved_tokens)
        for level in forest.levels:
            fitting = tuple(
                group
                for group in level
                if self._copies.get(table[group.rows[0], : group.segment.blocks]) is not None
            )
            if len(fitting) < len(level):
                metrics.say_once(
                    "a shared segment exceeds max_copy_gib; its requests are not relayed"
                )
                forest = Forest((fitting,) if fitting else (), forest.num_rows, forest.block_size)
        return make_plan(forest, table, lens)

    def _step(self, common: Any, plan: RelayPlan) -> RelayStep:
        level = plan.levels[0]
        groups = []
        for i, tokens in enumerate(level.seq_lens.tolist()):
            blocks = tokens // self.block_size
            segment = self._copies.get(level.block_table[i, :blocks])
            assert segment is not None  # made by _find_plan in this step
            begin, end = level.cu_rows[i : i + 2].tolist()
            groups.append(GroupStep(begin, end, blocks, segment))
        tables, lens = plan.context_block_table, plan.context_lens
        everything = np.arange(common.num_reqs)
        loners = np.setdiff1d(everything, plan.rows, assume_unique=True)
        return RelayStep(
            rows=None
            if np.array_equal(plan.rows, everything)
            else torch.from_numpy(plan.rows).long(),
            groups=tuple(groups),
            context=self._part(self._twice_the_heads, common, tables[plan.rows], lens[plan.rows]),
            loners=torch.from_numpy(loners),
            rest=self._part(self, common, tables[loners], lens[loners]) if len(loners) else None,
        )

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
            (self.kv_cache_dtype != "auto", "a quantised KV cache"),
        )
        return next((name for applies, name in checks if applies), None)

    def prepare(self, layer: Any, block_size: int, dtype: torch.dtype) -> None:
        """Find how the engine lays out this layer's blocks.

        The layer is left to vLLM when that fails.
        """
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
        """As vLLM's: query and output ``[T, Hq, D]``, kv_cache ``[num_blocks, Hkv, block_size, 2 *
        D]``.
        """
        step = attn_metadata.relay if isinstance(attn_metadata, RelayMetadata) else None
        if step is None or self.refusal is not None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        if step.rest is not None:
            # query stands in for key and value, which vLLM's decoder path does not read: they are
            # in the cache already
            q = query[step.loners]
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
        out, lse = self._context_attention(layer, query, kv_cache, step, system_lse)
        return relay_fusion([system_out, out], [system_lse, lse])

    def _context_attention(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: RelayStep,
        system_lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The context partial of the grouped rows, from vLLM's kernel: ``[N, Hq, D], [Hq, N]``."""
        twice = give_heads_twice(query, self.num_kv_heads)
        with_sinks = copy.copy(self)

        def attend(sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with_sinks.sinks = sinks_for_both(sinks, self.num_kv_heads)
            out = super(RelayImpl, with_sinks).forward(
                layer, twice, twice, twice, kv_cache, step.context, torch.empty_like(twice)
            )
            return part_both(out, self.num_kv_heads)

        out, lse, unknown = attend_with_lse(attend, system_lse)
        if unknown.any():
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
