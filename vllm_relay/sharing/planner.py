"""The planner: the policy's choice for step after step."""

from dataclasses import dataclass, field

import numpy as np

from vllm_relay.sharing.cost import Costs, StepShape
from vllm_relay.sharing.forest import Int32Array, check_batch
from vllm_relay.sharing.policy import Choice, choose
from vllm_relay.sharing.trie import build_trie

# Steps for which `Planner` keeps a choice while requests and shared blocks stay the same. Only
# contexts grow meanwhile, and predictions change little.
KEEP_STEPS = 64


class Planner:
    """Chooses the groups of step after step; a step like the last one costs next to nothing.

    Args:
        block_size: tokens per block. costs, max_levels: as `choose`.
    """

    def __init__(self, block_size: int, costs: Costs, max_levels: int) -> None:
        self.block_size = block_size
        self.costs = costs
        self.max_levels = max_levels
        self._kept: _Kept | None = None

    def plan(self, block_table: Int32Array, seq_lens: Int32Array, query_lens: Int32Array) -> Choice:
        """The groups of one step; predictions are of the step in which they were chosen.

        Two requests share a block iff they hold the same id at the same column and at every column
        before it: identity is the physical block (contract 2). Only full blocks computed before a
        request's first query token count (contract 1); an id <= 0 (vLLM's null block) ends them.

        Args:
            block_table: int32 [R, M]. Columns past a request's computed blocks are not trusted.
            seq_lens, query_lens: int32 [R], as `StepShape`; 0 for padding.

        Raises:
            ValueError: a wrong shape or dtype, a negative length, or block_size < 1.
        """
        kept = self._kept
        if kept is not None and kept.holds(block_table, seq_lens, query_lens, self.block_size):
            return kept.choice
        computed = _computed(seq_lens, query_lens)
        check_batch(block_table, computed, self.block_size, lens_name="computed lengths")
        trie = build_trie(block_table, computed, self.block_size)
        shape = StepShape(trie, self.block_size, seq_lens.copy(), query_lens.copy())
        choice = choose(shape, self.costs, self.max_levels)
        # One column more than two requests share: there they differ, or one of them ends.
        width = min(trie.width + 1, block_table.shape[1])
        self._kept = _Kept(
            block_table[:, :width].copy(), np.minimum(computed // self.block_size, width), choice
        )
        return choice


def _computed(seq_lens: Int32Array, query_lens: Int32Array) -> Int32Array:
    """Tokens before each request's first query; 0 without a query, for padding shares nothing."""
    return np.where(query_lens > 0, seq_lens - query_lens, np.int32(0))


@dataclass(eq=False)
class _Kept:
    """A choice and the part of the step that it was made from.

    The trie is the same while the leading columns and, within them, the computed blocks of every
    request are: two requests differ, or one ends, before the last of these columns.
    """

    columns: Int32Array
    blocks: Int32Array
    choice: Choice
    steps: int = field(default=0)

    def holds(
        self, block_table: Int32Array, seq_lens: Int32Array, query_lens: Int32Array, block_size: int
    ) -> bool:
        """True for a step of the same trie, for `KEEP_STEPS` steps."""
        self.steps += 1
        if self.steps > KEEP_STEPS or len(block_table) != len(self.columns):
            return False
        width = self.columns.shape[1]
        blocks = np.minimum(_computed(seq_lens, query_lens) // block_size, width)
        return (
            block_table.shape[1] >= width
            and np.array_equal(query_lens, self.choice.shape.query_lens)
            and np.array_equal(blocks, self.blocks)
            and np.array_equal(block_table[:, :width], self.columns)
        )
