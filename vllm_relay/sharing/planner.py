"""The planner: the policy's choice for step after step."""

from dataclasses import replace

import numpy as np

from vllm_relay.sharing.cost import Costs, StepShape
from vllm_relay.sharing.forest import Int32Array, check_batch
from vllm_relay.sharing.policy import Choice, choose
from vllm_relay.sharing.trie import Trie, build_trie, limited
from vllm_relay.sharing.window import shifted, shifted_back

# Steps for which `Planner` keeps a choice while requests and shared blocks stay the same. Only
# contexts grow meanwhile, and predictions change little.
KEEP_STEPS = 64
# Bound of `limited`, by which the policy's time grows: milliseconds for a chain of prefixes, of
# which every request holds one more block than the last.
MOST_HEIGHTS = 4096


class Planner:
    """Chooses the groups of step after step; a step like the last one costs next to nothing.

    Args:
        block_size: tokens per block. costs, max_levels: as `choose`.
        window: tokens that a query sees, its own included; 0: all. With one, a table comes from
            `window.without_null_blocks`, and segments may start past column 0.
    """

    def __init__(self, block_size: int, costs: Costs, max_levels: int, window: int = 0) -> None:
        self.block_size = block_size
        self.window = window
        self.costs = costs
        self.max_levels = max_levels
        # The last choice, with the columns and computed blocks that its trie was built from.
        self._kept: tuple[Choice, Int32Array, Int32Array] | None = None
        self._steps = 0

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
        # Padding, without a query, shares nothing.
        computed = np.where(query_lens > 0, seq_lens - query_lens, np.int32(0))
        self._steps += 1
        if self._steps > KEEP_STEPS or not self._holds(block_table, computed, query_lens):
            check_batch(block_table, computed, self.block_size, lens_name="computed lengths")
            trie = build_trie(block_table, computed, self.block_size)
            choice = self._choose(limited(trie, MOST_HEIGHTS), seq_lens.copy(), query_lens.copy())
            # One column more than two requests share: there they differ, or one of them ends. So
            # the trie is the same while these columns, and the computed blocks in them, are.
            columns = block_table[:, : trie.width + 1].copy()
            blocks = np.minimum(computed // self.block_size, columns.shape[1])
            self._kept, self._steps = (choice, columns, blocks), 1
        assert self._kept is not None
        return self._kept[0]

    def _choose(self, trie: Trie, lens: Int32Array, queries: Int32Array) -> Choice:
        if not self.window:
            shape = StepShape(trie, self.block_size, lens, queries)
            return choose(shape, self.costs, self.max_levels)
        first_seen = np.maximum(lens - queries - self.window + 1, 0) // self.block_size
        seen, left_out = shifted(trie, first_seen)
        # Those who share may see less of the segment than is left: that much is overrated.
        shown = lens - left_out * np.int32(self.block_size)
        shape = StepShape(seen, self.block_size, shown, queries)
        choice = choose(shape, self.costs, self.max_levels)
        return replace(choice, forest=shifted_back(choice.forest, left_out))

    def _holds(self, block_table: Int32Array, computed: Int32Array, query_lens: Int32Array) -> bool:
        """True for a step whose trie and queries are those of the last choice."""
        if self._kept is None:
            return False
        choice, columns, blocks = self._kept
        rows, width = columns.shape
        return (
            block_table.shape[0] == rows
            and block_table.shape[1] >= width
            and np.array_equal(query_lens, choice.shape.query_lens)
            and np.array_equal(np.minimum(computed // self.block_size, width), blocks)
            and np.array_equal(block_table[:, :width], columns)
        )
