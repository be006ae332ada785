"""The planner of one KV cache group's steps on the CPU: a `RelayStep` for each shape of layers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_relay.backend.continuity import Continuity
from vllm_relay.backend.cpu_impl import RelayStep
from vllm_relay.backend.packed_cache import Found, PackedCache, written_blocks
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.ops.step.native import NativeStep, partial_bytes
from vllm_relay.plan import SharingStats
from vllm_relay.sharing import Choice, Costs, Forest, Planner, context_of, make_plan, stats_of
from vllm_relay.sharing.forest import Int32Array
from vllm_relay.sharing.planner import KEEP_STEPS
from vllm_relay.sharing.window import UNSEEN, without_null_blocks


@dataclass(frozen=True, eq=False, kw_only=True)
class Planned:
    """A step of the layers of one shape.

    Attributes:
        step: that they run. forest: its groups. stats: numbers of what they share.
        saved: seconds per layer that it is predicted to save (KV tokens with `sharing.reads`);
            0 where the groups that were predicted had no room.
    """

    step: RelayStep
    forest: Forest
    stats: SharingStats
    saved: float


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layout:
    """Layout of the last step, with its choice and packed groups."""

    choice: Choice
    packed: list[bool]
    attention: NativeStep


class StepPlanner:
    """Plans the steps of one KV cache group.

    Args:
        costs: of each shape of layers. block_size: of the block tables.
        max_levels: as `sharing.choose`. packed: the packed segments.
        max_partial_bytes: a step whose partials would take more has no groups.
        continuity: the requests of the steps, beside a connector that loads KV; else None.
    """

    def __init__(
        self,
        costs: Mapping[AttentionShape, Costs],
        block_size: int,
        max_levels: int,
        packed: PackedCache,
        max_partial_bytes: float = math.inf,
        continuity: Continuity | None = None,
    ) -> None:
        self.packed = packed
        self._max_partial_bytes = max_partial_bytes
        self._continuity = continuity
        self._block_size = block_size
        self._costs = costs
        # Segments of windowed layers are not packed: their requests soon see another part.
        room = packed.max_bytes > 0
        self._layouts: dict[AttentionShape, _Layout] = {}
        self._planners = {
            shape: Planner(
                block_size,
                of_shape.with_packing(KEEP_STEPS) if room and not shape.window else of_shape,
                max_levels,
                shape.window,
            )
            for shape, of_shape in costs.items()
        }

    def plan(self, common: Any) -> dict[AttentionShape, Planned]:
        """One step; ``common``: vLLM's CommonAttentionMetadata. Called for every step.

        Returns:
            By shape, without those for which vLLM's own attention is predicted to be faster.
        """
        table = common.block_table_tensor.numpy()[: common.num_reqs]
        lens = common.seq_lens.numpy()[: common.num_reqs]
        starts = common.query_start_loc.numpy()[: common.num_reqs + 1]
        queries = starts[1:] - starts[:-1]  # np.diff takes several times as long
        new = self._continuity.new_rows(common.num_reqs) if self._continuity else None
        if self.packed:
            # All of it: whatever else is cut off a step, the engine writes these.
            written = written_blocks(common.slot_mapping.numpy(), self._block_size)
            computed = (lens - queries) // self._block_size
            if new is not None and new.any():
                written = np.union1d(written, self.packed.loaded(table, computed, new))
            self.packed.begin_step(table, computed, written)
        if common.causal is not True:
            return {}
        found = {
            shape: self._plan_shape(shape, table, lens, starts, queries) for shape in self._planners
        }
        return {shape: planned for shape, planned in found.items() if planned is not None}

    def _plan_shape(
        self,
        shape: AttentionShape,
        table: Int32Array,
        lens: Int32Array,
        starts: Int32Array,
        queries: Int32Array,
    ) -> Planned | None:
        planner = self._planners[shape]
        if shape.window:
            table = without_null_blocks(table)
        choice = planner.plan(table, lens, queries)
        layout = self._layouts.pop(shape, None)
        if not choice.ours:
            return None
        forest = choice.forest
        per_token = partial_bytes(len(forest.levels), shape.heads, shape.head_size)
        if int(starts[-1]) * per_token > self._max_partial_bytes:
            forest = Forest((), forest.num_rows, forest.block_size)
        if shape.window:
            table = np.where(table < UNSEEN, table, 0)  # which nobody reads
        groups = sum(map(len, forest.levels))
        found: list[Found | None] = [None] * groups
        if groups and not shape.window:
            found = self.packed.of_step(choice, table, self._costs[shape])
        packed = [held is not None for held in found]
        # The planner keeps a choice while requests, query tokens and shared blocks stay the same.
        if layout is not None and layout.choice is choice and layout.packed == packed:
            layout.attention.go_on(context_of(forest, table, lens, starts))
        else:
            layout = None  # its partials make room
            attention = NativeStep(make_plan(forest, table, lens, starts), packed, shape)
            layout = _Layout(choice=choice, packed=packed, attention=attention)
        self._layouts[shape] = layout
        step = RelayStep(layout.attention, [held for held in found if held is not None])
        saved = choice.stock - choice.relay if forest is choice.forest else 0.0
        return Planned(step=step, forest=forest, stats=stats_of(forest, lens), saved=saved)
