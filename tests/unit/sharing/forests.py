"""Forests for tests: the policy's from arrays, and the rules that every forest keeps."""

import numpy as np

from vllm_relay.sharing import Costs, Forest, Group, Planner, reads


def find_forest(
    block_table: np.ndarray,
    computed_lens: np.ndarray,
    block_size: int,
    costs: Costs | None = None,
) -> Forest:
    """One level of groups of requests with one query each; by default the fewest KV reads."""
    planner = Planner(block_size, reads() if costs is None else costs, max_levels=1)
    lens = computed_lens + np.int32(1)
    return planner.plan(block_table, lens, np.ones_like(lens)).forest


def check_forest(forest: Forest) -> None:
    """Raise ValueError with the first rule that is broken; whether blocks are shared is not one."""
    if forest.block_size < 1 or forest.num_rows < 0:
        raise ValueError("forest: block_size must be >= 1 and num_rows >= 0")
    parent = np.zeros(forest.num_rows, dtype=np.int32)  # one common root above level 0
    end_of = {0: 0}
    for depth, level in enumerate(forest.levels):
        if not level:
            raise ValueError(f"forest: level {depth} is empty")
        owner = np.full(forest.num_rows, -1, dtype=np.int32)
        last_parent = 0
        for index, group in enumerate(level):
            name = f"forest: level {depth}, group {index}"
            _check_group(forest, group, name)
            parents = np.unique(parent[group.rows])
            if len(parents) != 1 or parents[0] < 0:
                raise ValueError(f"{name}: rows must lie in one group of the level above")
            if parents[0] < last_parent:
                raise ValueError(f"{name}: groups must be in the order of those around them")
            last_parent = int(parents[0])
            if group.segment.start != end_of[int(parents[0])]:
                raise ValueError(f"{name}: the segment must start where the one above ends")
            if (owner[group.rows] >= 0).any():
                raise ValueError(f"{name}: a row is in another group of this level")
            owner[group.rows] = index
        parent = owner
        end_of = {index: group.segment.end for index, group in enumerate(level)}


def _check_group(forest: Forest, group: Group, name: str) -> None:
    rows = group.rows
    if rows.dtype != np.int32 or rows.ndim != 1 or len(rows) < 2:
        raise ValueError(f"{name}: rows must be int32 [>= 2]")
    if rows[0] < 0 or rows[-1] >= forest.num_rows or (np.diff(rows) <= 0).any():
        raise ValueError(f"{name}: rows must ascend within [0, {forest.num_rows})")
    if group.segment.blocks < 1:
        raise ValueError(f"{name}: a segment has at least one block")
