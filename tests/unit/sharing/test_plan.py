"""make_plan: from its arrays alone every request's blocks can be put together again."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sharing.forests import check_forest, find_forest
from tests.unit.sharing.oracle import check_rows
from vllm_relay.sharing import (
    Forest,
    Group,
    HostPlan,
    Segment,
    largest_groups,
    make_plan,
    stats_of,
)

BLOCK_SIZE = 4


def group(start: int, blocks: int, *rows: int) -> Group:
    return Group(Segment(start, blocks), np.array(rows, dtype=np.int32))


def starts_of(queries: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)


def check_plan(
    plan: HostPlan,
    forest: Forest,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    queries: Sequence[int],
) -> None:
    """Rebuild each request's block list and lengths from the plan and compare with the input."""
    size, context = forest.block_size, plan.context
    row_of_token = np.repeat(np.arange(len(seq_lens)), queries)
    arrays = [context.query_start_loc, context.block_table, context.seq_lens, plan.index]
    assert plan.index.shape == (len(forest.levels), len(row_of_token))
    assert context.query_start_loc.tolist() == starts_of(queries).tolist() and context.causal
    planned = []
    for level, index, groups in zip(plan.levels, plan.index, forest.levels, strict=True):
        starts = level.query_start_loc
        arrays += [starts, level.block_table, level.seq_lens]
        assert starts[0] == 0 and starts[-1] == len(row_of_token) and (np.diff(starts) >= 0).all()
        assert len(level.block_table) == len(level.seq_lens) == len(starts) - 1
        assert level.block_table.shape[1] == max(g.segment.blocks for g in groups)
        assert not level.causal and level.max_query_len == np.diff(starts).max()
        assert level.max_seq_len == level.seq_lens.max()
        # The batch's tokens in the order of the level; those of each request stay in order.
        order = np.full(starts[-1], -1)
        order[index[index >= 0]] = np.flatnonzero(index >= 0)
        planned.append([])
        for i, tokens in enumerate(level.seq_lens.tolist()):
            mine = order[starts[i] : starts[i + 1]]
            used, padding = np.split(level.block_table[i], [tokens // size])
            assert tokens % size == 0 and not padding.any()
            if tokens:
                rows = row_of_token[mine]
                assert (np.diff(mine)[np.diff(rows) == 0] == 1).all()
                planned[-1].append((np.unique(rows).tolist(), used.tolist()))
            else:
                assert (mine == -1).all()
        # The k-th sequence with keys is the k-th group.
        assert [rows for rows, _ in planned[-1]] == [g.rows.tolist() for g in groups]
    # One order serves all levels.
    for index in plan.index[1:]:
        assert ((index == plan.index[0]) | (index == -1)).all()
    assert all(array.dtype == np.int32 for array in arrays)

    check_rows(planned, context.block_table, context.seq_lens, block_table, seq_lens, size)
    needed = -(-context.seq_lens // size)
    for row, blocks in enumerate(needed.tolist()):
        assert not context.block_table[row, blocks:].any()
    assert context.block_table.shape == (len(seq_lens), needed.max())

    stats = stats_of(forest, seq_lens)
    saved = sum((len(g.rows) - 1) * g.segment.blocks for lv in forest.levels for g in lv) * size
    assert stats.tokens_stock == seq_lens.sum() and stats.tokens_saved == saved
    assert stats.tokens_shared == seq_lens.sum() - saved - context.seq_lens.sum()
    assert stats.groups == sum(map(len, forest.levels)) and stats.steps_relayed == bool(
        forest.levels
    )
    grouped = {row for g in (forest.levels or ((),))[0] for row in g.rows.tolist()}
    assert stats.requests == len(grouped)


def test_one_level_with_an_ungrouped_request_and_padding() -> None:
    block_table = np.array(
        [[1, 2, 3, 4], [9, 8, 7, 6], [1, 2, 5, 77], [66, 77, 88, 99]], dtype=np.int32
    )
    seq_lens = np.array([14, 16, 10, 0], dtype=np.int32)
    forest = find_forest(block_table, np.maximum(seq_lens - 1, 0), BLOCK_SIZE)
    queries = [1, 1, 1, 0]
    plan = make_plan(forest, block_table, seq_lens, starts_of(queries))
    check_plan(plan, forest, block_table, seq_lens, queries)
    (level,) = plan.levels
    assert plan.index.tolist() == [[0, -1, 1]]
    assert level.query_start_loc.tolist() == [0, 2, 3]
    assert level.block_table.tolist() == [[1, 2], [0, 0]]
    assert level.seq_lens.tolist() == [8, 0]
    assert plan.context.seq_lens.tolist() == [6, 16, 2, 0]
    assert plan.context.block_table.tolist() == [
        [3, 4, 0, 0], [9, 8, 7, 6], [5, 0, 0, 0], [0, 0, 0, 0]
    ]  # fmt: skip
    stats = stats_of(forest, seq_lens)
    assert (stats.tokens_stock, stats.tokens_shared, stats.tokens_saved) == (40, 8, 8)


def test_two_levels_fill_the_gaps_between_nested_groups() -> None:
    # Requests 0, 3, 5, 7 share a block, 0 and 7 two more; 1, 2, 6 share two, 2 and 6 one more.
    block_table = np.array(
        [
            [1, 2, 3, 10, 0],
            [4, 5, 11, 12, 0],
            [4, 5, 6, 13, 14],
            [1, 15, 16, 0, 0],
            [17, 18, 0, 0, 0],
            [1, 19, 0, 0, 0],
            [4, 5, 6, 20, 0],
            [1, 2, 3, 21, 22],
        ],
        dtype=np.int32,
    )
    seq_lens = np.array([13, 16, 17, 9, 5, 8, 13, 18], dtype=np.int32)
    queries = [1, 2, 1, 1, 3, 1, 1, 1]
    outer = (group(0, 1, 0, 3, 5, 7), group(0, 2, 1, 2, 6))
    forest = Forest((outer, (group(1, 2, 0, 7), group(2, 1, 2, 6))), 8, BLOCK_SIZE)
    check_forest(forest)
    plan = make_plan(forest, block_table, seq_lens, starts_of(queries))
    check_plan(plan, forest, block_table, seq_lens, queries)
    # Requests in plan order: 0, 7, 3, 5; 2, 6, 1; 4.
    assert plan.levels[0].query_start_loc.tolist() == [0, 4, 8, 11]
    assert plan.levels[1].query_start_loc.tolist() == [0, 2, 4, 6, 11]
    assert plan.levels[1].seq_lens.tolist() == [8, 0, 4, 0]
    assert plan.levels[1].block_table.tolist() == [[2, 3], [0, 0], [6, 0], [0, 0]]


def test_a_plan_without_groups_is_a_plan_of_contexts() -> None:
    for shape in ((0, 0), (0, 3), (2, 3)):
        seq_lens = np.full(shape[0], 3, dtype=np.int32)
        forest = Forest((), shape[0], BLOCK_SIZE)
        starts = starts_of([1] * shape[0])
        plan = make_plan(forest, np.ones(shape, dtype=np.int32), seq_lens, starts)
        assert plan.levels == () and plan.index.shape == (0, shape[0])
        assert plan.context.seq_lens.tolist() == seq_lens.tolist()


@st.composite
def forests(draw: st.DrawFn) -> tuple[Forest, np.ndarray, np.ndarray]:
    """Up to three levels over up to 12 rows, and a block table that really shares these blocks."""
    num_rows = draw(st.integers(2, 12))
    ids = iter(range(1, 10_000))
    tables: list[list[int]] = [[] for _ in range(num_rows)]

    def split(rows: list[int], start: int) -> list[Group]:
        labels = draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
        made = []
        for label in (1, 2):  # 0: in no group at this level
            members = [row for row, own in zip(rows, labels, strict=True) if own == label]
            if len(members) > 1:
                segment = Segment(start, draw(st.integers(1, 3)))
                shared = [next(ids) for _ in range(segment.blocks)]
                for row in members:
                    tables[row] += shared
                made.append(Group(segment, np.array(members, dtype=np.int32)))
        return made

    levels = [split(list(range(num_rows)), 0)]
    while levels[-1] and len(levels) < 4:
        levels.append([g for p in levels[-1] for g in split(p.rows.tolist(), p.segment.end)])
    seq_lens = []
    for row in tables:
        own = draw(st.integers(1 if row else 0, 9))
        seq_lens.append(len(row) * BLOCK_SIZE + own)
        row += [next(ids) for _ in range(-(-own // BLOCK_SIZE))]
    width = max(map(len, tables)) + draw(st.integers(0, 2))
    stale = 5_000_000
    block_table = np.array([row + [stale] * (width - len(row)) for row in tables], dtype=np.int32)
    kept = tuple(tuple(level) for level in levels if level)
    return Forest(kept, num_rows, BLOCK_SIZE), block_table, np.array(seq_lens, dtype=np.int32)


@settings(max_examples=400, deadline=None)
@given(forests(), st.integers(0, 2**16))
def test_any_forest_can_be_put_together_again(
    case: tuple[Forest, np.ndarray, np.ndarray], seed: int
) -> None:
    forest, block_table, seq_lens = case
    check_forest(forest)
    queries = np.random.default_rng(seed).integers(1, 4, len(seq_lens))
    before = block_table.copy(), seq_lens.copy()
    plan = make_plan(forest, block_table, seq_lens, starts_of(queries))
    assert (block_table == before[0]).all() and (seq_lens == before[1]).all()
    check_plan(plan, forest, block_table, seq_lens, queries)


@settings(max_examples=200, deadline=None)
@given(forests())
def test_the_forest_found_has_a_sound_plan(case: tuple[Forest, np.ndarray, np.ndarray]) -> None:
    _, block_table, seq_lens = case
    forest = find_forest(block_table, np.maximum(seq_lens - 1, 0), BLOCK_SIZE)
    queries = [1] * len(seq_lens)
    plan = make_plan(forest, block_table, seq_lens, starts_of(queries))
    check_plan(plan, forest, block_table, seq_lens, queries)


def test_the_plan_owns_its_arrays() -> None:
    block_table = np.array([[1, 2], [1, 3]], dtype=np.int32)
    seq_lens, starts = np.array([6, 7], dtype=np.int32), starts_of([1, 1])
    forest = Forest(((group(0, 1, 0, 1),),), 2, BLOCK_SIZE)
    plan = make_plan(forest, block_table, seq_lens, starts)
    block_table[:], seq_lens[:], starts[:] = 99, 0, 7
    assert plan.levels[0].block_table.tolist() == [[1]]
    assert plan.context.block_table.tolist() == [[2], [3]]
    assert plan.context.seq_lens.tolist() == [2, 3]
    assert plan.context.query_start_loc.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("rows", "dtype", "seq_lens", "message"),
    [
        (2, np.int64, [6, 7], "^block_table must be"),
        (3, np.int32, [6, 7, 7], "^forest has 2 rows"),
        (2, np.int32, [6, 7, 7], "^seq_lens must be an int32 array"),
        (2, np.int32, [6, -7], "^seq_lens must be >= 0"),
        (2, np.int32, [6, 13], "^seq_lens must be <= 12"),
        (2, np.int32, [6, 4], "^seq_lens must reach past the shared segments"),
    ],
)
def test_bad_input_is_named(rows: int, dtype, seq_lens: list[int], message: str) -> None:
    forest = Forest(((group(0, 1, 0, 1),),), 2, BLOCK_SIZE)
    with pytest.raises(ValueError, match=message):
        make_plan(
            forest,
            np.ones((rows, 3), dtype=dtype),
            np.array(seq_lens, dtype=np.int32),
            starts_of([1] * rows),
        )


def test_the_largest_groups_come_first_with_those_inside_next_as_plain_numbers() -> None:
    levels = (
        (group(0, 2, 0, 1), group(0, 3, 2, 3, 4, 5)),
        (group(3, 1, 2, 3), group(3, 4, 4, 5)),
    )
    found = largest_groups(Forest(levels, 7, BLOCK_SIZE), 3)
    assert [(x["level"], x["requests"], x["tokens"]) for x in found] == [
        *((0, 4, 12), (1, 2, 16), (1, 2, 4)),
    ]
    assert largest_groups(Forest((), 7, BLOCK_SIZE), 3) == []
    table = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    table[1, :2] = table[0, :2]
    forest = find_forest(table, np.full(3, 4 * BLOCK_SIZE - 1, dtype=np.int32), BLOCK_SIZE)
    assert json.dumps(largest_groups(forest, 3)) == '[{"level": 0, "requests": 2, "tokens": 8}]'
