"""A step's layout that goes on to the next step, against one made for that step."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_relay.backend.packed_cache import PackedCache
from vllm_relay.backend.step_planner import Planned, StepPlanner
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.ops.step.native import NativeStep
from vllm_relay.sharing import make_plan, reads

BLOCK, ROWS, SHARED = 16, 6, 3
SHAPE = AttentionShape(heads=4, kv_heads=2, head_size=32, dtype=torch.float32, scale=0.2)


class Steps:
    """Requests of an engine, step after step; half of them share `SHARED` blocks."""

    def __init__(self, window: int) -> None:
        self.rng = np.random.default_rng(0)
        self.shape = replace(SHAPE, window=window)
        self.planner = StepPlanner({self.shape: reads(0)}, BLOCK, 3, PackedCache(1, 0))
        self.lens = np.zeros(ROWS, dtype=np.int32)
        self.table = np.zeros((ROWS, 40), dtype=np.int32)
        self.used = 100
        self.prefix = np.arange(1, SHARED + 1)
        for row in range(ROWS):
            self.replace(row)

    def replace(self, row: int) -> None:
        """Another request in a row's place."""
        self.lens[row] = SHARED * BLOCK + int(self.rng.integers(1, 40))
        self.table[row] = self.used + np.arange(self.table.shape[1])
        self.used += self.table.shape[1]
        if row % 2:
            self.table[row, :SHARED] = self.prefix

    def move_prefix(self) -> None:
        """Other KV blocks in the place of those that are shared."""
        self.prefix = self.prefix % 90 + SHARED
        self.table[1::2, :SHARED] = self.prefix

    def plan(self, queries: np.ndarray) -> tuple[Planned, NativeStep]:
        """The next step as the planner plans it, and its layout made anew."""
        self.lens += queries
        starts = np.cumsum([0, *queries], dtype=np.int32)
        common: Any = SimpleNamespace(
            num_reqs=ROWS,
            block_table_tensor=torch.from_numpy(self.table),
            seq_lens=torch.from_numpy(self.lens.copy()),
            query_start_loc=torch.from_numpy(starts),
            causal=True,
        )
        planned = self.planner.plan(common)[self.shape]
        plan = make_plan(planned.forest, self.table, self.lens, starts)
        groups = sum(map(len, planned.forest.levels))
        return planned, NativeStep(plan, [False] * groups, self.shape)


@pytest.mark.parametrize("window", [0, 64])
def test_a_layout_that_goes_on_is_that_of_the_step(window: int) -> None:
    steps, layouts, grouped = Steps(window), [], 0
    for number in range(300):
        queries = np.ones(ROWS, dtype=np.int32)
        if number % 7 == 6:
            queries[number % ROWS] += 2  # a draft
        if number % 11 == 10:
            steps.replace(number % ROWS)
        if number % 23 == 22:
            steps.move_prefix()
        planned, anew = steps.plan(queries)
        found = planned.step.attention
        layouts.append(found)
        grouped += bool(planned.forest.levels)
        for name in ("seq_lens", "block_table", "key_starts", "query_start_loc"):
            mine, expected = (getattr(x.plan.context, name) for x in (found, anew))
            assert np.array_equal(mine, expected), name
        for mine, expected in zip(found.plan.levels, anew.plan.levels, strict=True):
            assert np.array_equal(mine.block_table, expected.block_table)
        assert np.array_equal(
            found.call.sequences[:, : native.TABLE], anew.call.sequences[:, : native.TABLE]
        )
        assert found.call.positions is not None and anew.call.positions is not None
        assert np.array_equal(found.call.positions, anew.call.positions)
        table = found.plan.context.block_table
        addresses = table.ctypes.data + np.arange(ROWS) * table.strides[0]
        assert np.array_equal(found.call.sequences[-ROWS:, native.TABLE], addresses)
    kept = sum(a is b for a, b in pairwise(layouts))
    assert 150 < kept < 290 and grouped > 250
