"""`DevicePlan`: the plan of a step on the GPU, in buffers with one owner, written in place.

The counterpart of `sharing.make_plan` for engines whose block tables exist on the GPU only. The
host learns nothing and waits for nothing, shapes depend on the batch's shape alone and addresses
never change, so that CUDA graphs captured over these buffers see each step's plan.
"""

import torch
from torch import Tensor

from vllm_relay.ops import checks
from vllm_relay.ops.planning import launch
from vllm_relay.ops.planning.launch import STATS, PlanBuffers, plan_step
from vllm_relay.plan import DensePart, Part, Plan, SharingStats

# Reports kept on the host: of the last steps.
_REPORTS = 3


class DevicePlan:
    """Plans steps of up to ``max_rows`` requests over a paged KV cache; ``updates``: steps planned.

    Rows share a block iff their tables hold the same id at the same column and at all columns
    before it (contract 2). A segment holds only full blocks computed before the row's first query
    of the step (contract 1). Every row is in at most one group per level; a group of level i + 1
    lies in one group of level i and starts where that one ends.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        max_blocks: int,
        block_size: int,
        min_saved_tokens: int = 0,
        max_levels: int = 1,
        dense: bool = False,
        window: int = 0,
        device: torch.device | str,
    ) -> None:
        """Allocate for the largest step.

        Args:
            max_rows: requests. max_tokens: query tokens with padding. max_blocks: columns.
            min_saved_tokens: fewest KV token reads that a group saves per step and layer,
                (members - 1) * tokens of its segment.
            dense: attend one group of level 0 as dense KV: of those whose blocks have consecutive
                ids, the one that saves most. Token i of block b must lie at b * block_size + i.
            window: tokens that a query sees with its own; a longer row shares nothing. 0: all.

        Raises:
            ValueError: an argument out of range, by name.
        """
        for name, value, least in (
            ("max_rows", max_rows, 1),
            ("max_tokens", max_tokens, 1),
            ("max_blocks", max_blocks, 1),
            ("block_size", block_size, 1),
            ("min_saved_tokens", min_saved_tokens, 0),
            ("max_levels", max_levels, 1),
            ("window", window, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected a whole number >= {least}, got {value!r}")
        self.max_rows, self.max_tokens, self.max_blocks = max_rows, max_tokens, max_blocks
        self.block_size, self.max_levels, self.dense = block_size, max_levels, dense
        self.window = window
        self._min_saved_blocks = -(-min_saved_tokens // block_size)
        self.buffers = PlanBuffers.allocate(
            rows=max_rows,
            tokens=max_tokens,
            columns=max_blocks,
            groups=self._max_groups(max_rows),
            levels=max_levels,
            dense=dense,
            device=torch.device(device),
        )
        # Page-locked, so that copies into them are asynchronous.
        cuda = self.buffers.report.is_cuda
        self._reports = [
            torch.zeros(self.buffers.report.shape, dtype=torch.int64, pin_memory=cuda)
            for _ in range(_REPORTS)
        ]
        self._copied = [torch.cuda.Event() if cuda else None for _ in range(_REPORTS)]
        self.updates = 0

    def _max_groups(self, rows: int) -> int:
        """Most groups of a level of ``rows`` requests: each has two members and saves enough."""
        bound = min(rows // 2, launch.MAX_GROUPS)
        if self._min_saved_blocks:
            bound = min(bound, rows * self.max_blocks // self._min_saved_blocks)
        return max(1, bound)

    def update(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        *,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        count: bool = True,
    ) -> Plan[Tensor]:
        """Plan a step; launches kernels on the current stream and returns.

        Args:
            block_table: int32 [R, M], rows any stride apart. Columns past a row's blocks are not
                trusted, an id <= 0 (vLLM's null block) ends what can be shared.
            seq_lens: int32 [R], tokens with this step's queries; 0 for padding.
            query_start_loc: int32 [R + 1]; flat for padding.
            num_tokens: query tokens of the step, with padding that belongs to no row.
            max_query_len, max_seq_len: upper bounds, for the parts.
            count: count the step in the totals of `report`.

        Returns:
            Views of the buffers, which the next call overwrites: steps of one shape have the same
            shapes and addresses.

        Raises:
            ValueError: a shape, dtype or device does not fit; the message names the argument.
        """
        checks.rank("block_table", block_table, 2, "[R, M]")
        rows, columns = block_table.shape
        if not 2 <= rows <= self.max_rows:
            raise ValueError(f"block_table: {rows} rows are not in 2 .. {self.max_rows}")
        if columns > self.max_blocks:
            raise ValueError(f"block_table: {columns} columns are more than {self.max_blocks}")
        self._check("block_table", block_table, (rows, columns), "[R, M]")
        self._check("seq_lens", seq_lens, (rows,), "[R]")
        self._check("query_start_loc", query_start_loc, (rows + 1,), "[R + 1]")
        if not 0 <= num_tokens <= self.max_tokens:
            raise ValueError(f"num_tokens: {num_tokens} is not in 0 .. {self.max_tokens}")
        groups, b = self._max_groups(rows), self.buffers
        plan_step(
            block_table,
            seq_lens,
            query_start_loc,
            b,
            num_tokens=num_tokens,
            num_groups=groups,
            block_size=self.block_size,
            window=self.window,
            min_saved_blocks=self._min_saved_blocks,
            counted=count,
        )
        slot = self.updates % _REPORTS
        self._reports[slot].copy_(b.report, non_blocking=True)
        event = self._copied[slot]
        if event is not None and not torch.cuda.is_current_stream_capturing():
            event.record()
        self.updates += 1
        return Plan(
            levels=[
                Part(
                    query_start_loc=b.cu_tokens[level, : groups + 1],
                    seq_lens=b.segment_lens[level, :groups],
                    block_table=b.segment_table[level, :groups],
                    # A group may hold every query.
                    max_query_len=num_tokens,
                    max_seq_len=max_seq_len,
                    causal=False,
                )
                for level in range(self.max_levels)
            ],
            context=Part(
                query_start_loc=query_start_loc,
                seq_lens=b.context_lens[:rows],
                block_table=b.context_table[:rows],
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                causal=True,
            ),
            index=b.index[:, :num_tokens],
            dense=DensePart(
                query_start_loc=b.dense[0],
                key_start_loc=b.dense[1],
                max_query_len=num_tokens,
                max_seq_len=max_seq_len,
            )
            if self.dense
            else None,
        )

    def _check(self, name: str, x: Tensor, want: tuple[int, ...], layout: str) -> None:
        checks.shape(name, x, want, layout)
        device = self.buffers.depth.device
        if x.dtype != torch.int32 or x.device != device:
            raise ValueError(f"{name}: expected int32 on {device}, got {x.dtype} on {x.device}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: expected a dense last dimension, got strides {x.stride()}")

    def report(self, update: int) -> tuple[SharingStats, SharingStats]:
        """Numbers of planned step ``update``, from 0, and of all counted steps up to it.

        Waits for that plan. For a step before the last the GPU is done with it: no time.

        Raises:
            ValueError: it is not one of the last three.
        """
        if not max(0, self.updates - _REPORTS) <= update < self.updates:
            raise ValueError(f"update: {update} is not one of the last {_REPORTS} before now")
        if (event := self._copied[update % _REPORTS]) is not None:
            event.synchronize()
        numbers = self._reports[update % _REPORTS].tolist()
        step, (steps, relayed), total = numbers[:STATS], numbers[STATS:-STATS], numbers[-STATS:]
        return (
            SharingStats(*[*step, 1, int(step[0] > 0)]),
            SharingStats(*[*total, steps, relayed]),
        )

    def newest(self, wait: bool = True) -> tuple[SharingStats, SharingStats]:
        """`report` of the last planned step, or without ``wait`` of the last that is done."""
        for update in reversed(range(max(0, self.updates - _REPORTS), self.updates)):
            event = self._copied[update % _REPORTS]
            if wait or event is None or event.query():
                return self.report(update)
        return SharingStats(), SharingStats()
