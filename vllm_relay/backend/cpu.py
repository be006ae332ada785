"""The relay backend on vLLM's CPU engine: thin subclasses of vLLM's own ``CPU_ATTN``.

A step with groups runs, per layer, one call of our own kernels: system attention of every level,
the contexts of all rows, and relay fusion. Without those kernels it runs system attention per level
with PyTorch's, vLLM's own over what is left of the grouped rows, and fusion; rows in no group go to
vLLM's kernel as they are. Every other step, and every layer that the split does not cover, is
vLLM's own code on vLLM's own metadata. Rows may have any number of query tokens: decodes, drafts to
verify, prefills.
"""

import copy
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
from vllm_relay.backend.copies import SegmentCopies, SegmentCopy, written_blocks
from vllm_relay.backend.cpu_impl import RelayImpl, RelayMetadata
from vllm_relay.backend.cpu_native import NativeStep, make_step
from vllm_relay.backend.metadata import GroupStep, RelayStep
from vllm_relay.backend.packing import Packed, Packing
from vllm_relay.config import RelayConfig, only_system_kv
from vllm_relay.ops.cpu import native
from vllm_relay.sharing import (
    Choice,
    Costs,
    Forest,
    Group,
    Planner,
    RelayPlan,
    Segment,
    make_plan,
    predict,
    reads,
)
from vllm_relay.sharing.device import SHIPPED, cpu_name, find_costs

LEVELS = 3
IN_PLACE = (None, slice(0))
# Of each group of each level: a copy and which of its blocks.
Copies = list[list[tuple[SegmentCopy, slice]]]


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
        self._native = self._choose_kernels(self._impls)
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
        # Seconds per layer that groups would have saved for which no copy was made.
        self._forgone = 0.0
        self._packing = Packing(self._block)
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

    @staticmethod
    def _choose_kernels(impls: list["RelayImpl"]) -> bool:
        """Whether our own kernels run relayed steps; says why not."""
        served = [impl for impl in impls if impl.refusal is None]
        reasons = {impl.not_native for impl in served} - {None}
        if len({(x.num_heads, x.num_kv_heads, x.head_size, x.scale) for x in served}) > 1:
            reasons.add("layers differ in their heads or their scale")
        if isinstance(native.library(), str):
            return False  # which has been said
        for reason in sorted(map(str, reasons)):
            metrics.say_once(f"PyTorch's CPU kernels are used, not our own: {reason}")
        return not reasons

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
        return cpu_name(self.isa, native.loaded().isa if self._native else "torch")

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

    def _plan_step(self, common: Any) -> RelayStep | NativeStep | None:
        rows = common.num_reqs
        table = common.block_table_tensor[:rows].numpy()
        lens = common.seq_lens[:rows].numpy()
        queries = np.diff(common.query_start_loc[: rows + 1].numpy())
        if self._copies:
            slots = common.slot_mapping[: common.num_actual_tokens].numpy()
            computed = (lens - queries) // self._block
            self._copies.begin_step(table, computed, written_blocks(slots, self._block))
        step: RelayStep | NativeStep | None = None
        plan = None
        if rows > 1 and common.causal is True:
            choice = self._planner.plan(table, lens, queries)
            if choice.forest.levels and self._native:
                packed = self._packing.segments(choice, table, self._costs, self._copies)
                plan = make_plan(choice.forest, table, lens)
                assert plan is not None  # there are groups
                step = self._native_step(common, plan, packed, queries)
            elif choice.forest.levels:
                forest, copies = self._copy_segments(choice, table)
                plan = make_plan(forest, table, lens)
                if plan is not None:
                    step = self._step(common, plan, copies, queries)
        metrics.count_step(plan, self._bytes_per_token)
        return step

    def _native_step(
        self, common: Any, plan: RelayPlan, packed: Packed, queries: np.ndarray
    ) -> NativeStep:
        loners = np.setdiff1d(np.arange(common.num_reqs), plan.rows, assume_unique=True)
        rows = np.concatenate([plan.rows, loners])
        levels = [
            [
                None if group < 0 else GroupStep(begin, end, *(of_level[group] or IN_PLACE))
                for begin, end, group in sequences
            ]
            for sequences, of_level in zip(_sequences(plan, queries), packed, strict=True)
        ]
        tokens = _tokens(rows, common.query_start_loc[: common.num_reqs + 1].numpy())
        ordered = np.array_equal(tokens, np.arange(common.num_actual_tokens))
        impl = next(impl for impl in self._impls if impl.refusal is None)
        return make_step(
            plan, levels, rows, queries[rows], None if ordered else tokens, impl, self.dtype
        )

    def _copy_segments(self, choice: Choice, table: np.ndarray) -> tuple[Forest, Copies]:
        """The best of the chosen groups that are copied or are worth it, and their copies.

        A copy costs about as much as some steps with it save, and nobody knows how many will come.
        It is made once the steps without it have forgone as much: then waiting and copying cost no
        more than twice what was best.
        """
        segments = [
            (table[group.rows[0], group.segment.start : group.segment.end], group.segment.start)
            for level in choice.forest.levels
            for group in level
        ]
        in_use = [copy for x in segments for copy, _ in filter(None, [self._copies.find(*x)])]
        blocks = sum(self._copies.to_make(*x, in_use) for x in segments)
        if not blocks:
            forest, copies, _ = self._usable(choice, table, in_use)
            return forest, copies
        forest, copies, cost = self._usable(choice, table, in_use)
        price = blocks * self._block * self._costs.copy
        self._forgone = min(self._forgone + cost - choice.relay, price)
        if self._forgone < price:
            return forest, copies
        self._forgone = 0.0
        forest, copies, _ = self._usable(choice, table, in_use, make=True)
        return forest, copies

    def _usable(
        self, choice: Choice, table: np.ndarray, in_use: list[SegmentCopy], make: bool = False
    ) -> tuple[Forest, Copies, float]:
        """What can be run of a choice, the copies for it, and its predicted cost.

        Groups are cut to what is copied. That may take longer than nothing, or than without them.
        """
        cut, copies, whole = self._cut(choice.forest, table, in_use, make)
        if whole:
            return cut, copies, choice.relay
        if make:
            metrics.say_once("shared segments are cut to what max_copy_gib allows")
        nothing = Forest((), cut.num_rows, cut.block_size)
        candidates: list[tuple[Forest, Copies, float]] = [(nothing, [], choice.stock)]
        for forest, of_forest in (
            (cut, copies),
            self._cut(choice.forest, table, in_use, make=False, only_whole=True)[:2],
        ):
            candidates.append((forest, of_forest, predict(forest, choice.shape, self._costs)))
        return min(candidates, key=lambda candidate: candidate[2])

    def _cut(
        self,
        forest: Forest,
        table: np.ndarray,
        in_use: list[SegmentCopy],
        make: bool,
        only_whole: bool = False,
    ) -> tuple[Forest, Copies, bool]:
        """A forest as far as its segments are copied, its copies, and whether nothing is cut."""
        levels: list[tuple[Group, ...]] = []
        copies: Copies = []
        uncut = set(range(forest.num_rows))  # rows all of whose segments so far are whole
        everything = True
        for level in forest.levels:
            groups: list[Group] = []
            of_level: list[tuple[SegmentCopy, slice]] = []
            still_uncut: set[int] = set()
            for group in level:
                if int(group.rows[0]) not in uncut:
                    continue
                start, count = group.segment.start, group.segment.blocks
                blocks = table[group.rows[0], start : group.segment.end]
                found = self._copies.get(blocks, start, in_use, make)
                have = 0 if found is None else found[1].stop - found[1].start
                everything &= have == count
                if found is None or (only_whole and have < count):
                    continue
                in_use.append(found[0])
                of_level.append(found)
                groups.append(Group(Segment(start, have), group.rows))
                if have == count:
                    still_uncut.update(group.rows.tolist())
            if groups:
                levels.append(tuple(groups))
                copies.append(of_level)
            uncut = still_uncut
        return Forest(tuple(levels), forest.num_rows, forest.block_size), copies, everything

    def _step(
        self,
        common: Any,
        plan: RelayPlan,
        copies: Copies,
        queries: np.ndarray,
    ) -> RelayStep:
        starts = common.query_start_loc[: common.num_reqs + 1].numpy()
        levels = [
            tuple(
                GroupStep(begin, end, *of_level[group]) for begin, end, group in level if group >= 0
            )
            for level, of_level in zip(_sequences(plan, queries), copies, strict=True)
        ]
        tokens = _tokens(plan.rows, starts)
        everything = np.arange(common.num_actual_tokens)
        loners = np.setdiff1d(np.arange(common.num_reqs), plan.rows, assume_unique=True)
        tables, lens = plan.context_block_table, plan.context_lens
        context, heads_twice = self._context(
            common, tables[plan.rows], lens[plan.rows], queries[plan.rows]
        )
        rest = None
        if len(loners):
            rest = self._part(self, common, tables[loners], lens[loners], queries[loners])
        return RelayStep(
            tokens=None if np.array_equal(tokens, everything) else torch.from_numpy(tokens),
            levels=tuple(levels),
            context=context,
            heads_twice=heads_twice,
            loners=torch.from_numpy(_tokens(loners, starts)),
            rest=rest,
        )

    def _context(
        self, common: Any, tables: np.ndarray, lens: np.ndarray, queries: np.ndarray
    ) -> tuple[CPUAttentionMetadata, bool]:
        """vLLM's metadata of the grouped rows' contexts; whether it is for heads given twice."""
        if self._twice_the_heads is not None:
            try:
                return self._part(self._twice_the_heads, common, tables, lens, queries), True
            except RuntimeError:
                # With AMX vLLM's kernel refuses more than 16 query heads per KV head.
                self._twice_the_heads = None
        return self._part(self, common, tables, lens, queries), False

    @staticmethod
    def _part(
        builder: CPUAttentionMetadataBuilder,
        common: Any,
        tables: np.ndarray,
        lens: np.ndarray,
        queries: np.ndarray,
    ) -> CPUAttentionMetadata:
        """vLLM's metadata for rows with these tables and lengths, made by vLLM's builder."""
        starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
        torch.cumsum(torch.from_numpy(queries), 0, out=starts[1:])
        part = common.replace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(lens),
            num_reqs=len(lens),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(queries.max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=torch.from_numpy(tables),
        )
        return CPUAttentionMetadataBuilder.build(builder, 0, part)


def _sequences(plan: RelayPlan, queries: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """Of each level: begin and end of adjacent query tokens in the order of the plan, their group.

    The group is -1 for rows that only groups further out hold.
    """
    offsets = np.concatenate([[0], queries[plan.rows].cumsum()])
    levels = []
    for level in plan.levels:
        bounds = offsets[level.cu_rows].tolist()
        levels.append(list(zip(bounds[:-1], bounds[1:], level.groups.tolist(), strict=True)))
    return levels


def _tokens(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """int64: the query tokens of these rows, row after row; starts is the batch's ``[R + 1]``."""
    first, count = starts[rows].astype(np.int64), np.diff(starts)[rows]
    ends = count.cumsum()
    return np.repeat(first - (ends - count), count) + np.arange(count.sum())
