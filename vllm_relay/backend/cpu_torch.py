"""Relayed steps on PyTorch's CPU kernels and vLLM's own, where ours are not to be had.

System attention per level, vLLM's kernel over what is left of the grouped rows, and fusion; rows in
no group go to vLLM's kernel as they are. Shared segments are copied first, see `Copying`.
"""

import copy

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_relay.backend.copies import SegmentCopies
from vllm_relay.backend.copying import Copying
from vllm_relay.backend.metadata import Batch, GroupStep, RelayStep, sequences_of
from vllm_relay.sharing import Choice, Costs, RelayPlan, make_plan


class TorchSteps:
    """Makes them.

    Args:
        builder: vLLM's, whose ``num_heads`` are this model's. block_size: of block tables.
    """

    def __init__(self, builder: CPUAttentionMetadataBuilder, block_size: int) -> None:
        self._builder = builder
        self.keeping = Copying(block_size)
        # vLLM's builder plans its kernel's work for a number of query heads.
        self._twice_the_heads: CPUAttentionMetadataBuilder | None = copy.copy(builder)
        self._twice_the_heads.num_heads = 2 * builder.num_heads

    def make(
        self, batch: Batch, choice: Choice, costs: Costs, copies: SegmentCopies
    ) -> tuple[RelayPlan, RelayStep] | None:
        """Lay out a step of these groups, as far as their segments are copied."""
        forest, of_levels = self.keeping.segments(choice, batch.tables, costs, copies)
        plan = make_plan(forest, batch.tables, batch.lens)
        if plan is None:
            return None
        levels = [
            tuple(
                GroupStep(begin, end, *of_level[group]) for begin, end, group in level if group >= 0
            )
            for level, of_level in zip(sequences_of(plan, batch.queries), of_levels, strict=True)
        ]
        context, heads_twice = self._context(batch, plan, plan.rows)
        loners = batch.loners(plan)
        step = RelayStep(
            tokens=batch.places(plan.rows),
            levels=tuple(levels),
            context=context,
            heads_twice=heads_twice,
            loners=torch.from_numpy(batch.tokens(loners)),
            rest=_part(self._builder, batch, plan, loners) if len(loners) else None,
        )
        return plan, step

    def _context(
        self, batch: Batch, plan: RelayPlan, rows: np.ndarray
    ) -> tuple[CPUAttentionMetadata, bool]:
        """vLLM's metadata of these rows' contexts; whether it is for heads given twice."""
        if self._twice_the_heads is not None:
            try:
                return _part(self._twice_the_heads, batch, plan, rows), True
            except RuntimeError:
                # With AMX vLLM's kernel refuses more than 16 query heads per KV head.
                self._twice_the_heads = None
        return _part(self._builder, batch, plan, rows), False


def _part(
    builder: CPUAttentionMetadataBuilder, batch: Batch, plan: RelayPlan, rows: np.ndarray
) -> CPUAttentionMetadata:
    """vLLM's metadata for the contexts of some rows, made by vLLM's builder."""
    queries, lens = batch.queries[rows], plan.context_lens[rows]
    starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
    torch.cumsum(torch.from_numpy(queries), 0, out=starts[1:])
    part = batch.common.replace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(lens),
        num_reqs=len(rows),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(queries.max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=torch.from_numpy(plan.context_block_table[rows]),
    )
    return CPUAttentionMetadataBuilder.build(builder, 0, part)
