"""make_plan: from its arrays alone every row's blocks can be put together again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sharing.oracle import check_rows
from vllm_relay.sharing import Forest, Group, RelayPlan, Segment, find_forest, make_plan

BLOCK_SIZE = 4


def group(start: int, blocks: int, *rows: int) -> Group:
    return Group(Segment(start, blocks), np.array(rows, dtype=np.int32))


def check_plan(
    plan: RelayPlan, forest: Forest, block_table: np.ndarray, seq_lens: np.ndarray
) -> None:
    """Rebuild each row's block list and lengths from the plan and compare with what was planned."""
    size = forest.block_size
    arrays = [plan.rows, plan.context_block_table, plan.context_lens]
    planned = []
    assert len(plan.levels) == len(forest.levels)
    for level, groups in zip(plan.levels, forest.levels, strict=True):
        arrays += [level.cu_rows, level.block_table, level.seq_lens]
        assert level.cu_rows[0] == 0 and level.cu_rows[-1] == len(plan.rows)
        assert (np.diff(level.cu_rows) > 0).all()
        assert len(level.block_table) == len(level.seq_lens) == len(level.cu_rows) - 1
        assert level.block_table.shape[1] == max(g.segment.blocks for g in groups)
        planned.append([])
        for i, tokens in enumerate(level.seq_lens.tolist()):
            rows = plan.rows[level.cu_rows[i] : level.cu_rows[i + 1]].tolist()
            used, padding = np.split(level.block_table[i], [tokens // size])
            assert tokens % size == 0 and not padding.any()
            if tokens:
                planned[-1].append((rows, used.tolist()))
        members = sorted(sorted(rows) for rows, _ in planned[-1])
        assert members == sorted(g.rows.tolist() for g in groups)
    assert all(array.dtype == np.int32 for array in arrays)
    assert sorted(plan.rows.tolist()) == sorted({r for g in forest.levels[0] for r in g.rows})

    check_rows(planned, plan.context_block_table, plan.context_lens, block_table, seq_lens, size)
    needed = -(-plan.context_lens // size)
    for row, blocks in enumerate(needed.tolist()):
        assert not plan.context_block_table[row, blocks:].any()
    assert plan.context_block_table.shape == (len(seq_lens), needed.max())

    saved = sum((len(g.rows) - 1) * g.segment.blocks for lv in forest.levels for g in lv) * size
    assert plan.tokens_stock == seq_lens.sum()
    assert plan.tokens_relay == seq_lens.sum() - saved
    assert plan.tokens_shared == plan.tokens_relay - plan.context_lens.sum()
    assert plan.num_groups == forest.num_groups


def test_one_level_with_a_loner_and_padding() -> None:
    block_table = np.array(
        [[1, 2, 3, 4], [9, 8, 7, 6], [1, 2, 5, 77], [66, 77, 88, 99]], dtype=np.int32
    )
    seq_lens = np.array([14, 16, 10, 0], dtype=np.int32)
    forest = find_forest(block_table, np.maximum(seq_lens - 1, 0), BLOCK_SIZE)
    plan = make_plan(forest, block_table, seq_lens)
    assert plan is not None
    check_plan(plan, forest, block_table, seq_lens)
    assert plan.rows.tolist() == [0, 2]
    assert plan.levels[0].cu_rows.tolist() == [0, 2]
    assert plan.levels[0].block_table.tolist() == [[1, 2]]
    assert plan.levels[0].seq_lens.tolist() == [8]
    assert plan.context_lens.tolist() == [6, 16, 2, 0]
    assert plan.context_block_table.tolist() == [
        [3, 4, 0, 0], [9, 8, 7, 6], [5, 0, 0, 0], [0, 0, 0, 0]
    ]  # fmt: skip
    assert (plan.tokens_stock, plan.tokens_shared, plan.tokens_relay) == (40, 8, 32)


def test_two_levels_fill_the_gaps_between_nested_groups() -> None:
    # Rows 0, 3, 5, 7 share one block, 0 and 7 two more; 1, 2, 6 share two blocks, 2 and 6 one more.
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
    outer = (group(0, 1, 0, 3, 5, 7), group(0, 2, 1, 2, 6))
    forest = Forest((outer, (group(1, 2, 0, 7), group(2, 1, 2, 6))), 8, BLOCK_SIZE)
    forest.validate()
    plan = make_plan(forest, block_table, seq_lens)
    assert plan is not None
    check_plan(plan, forest, block_table, seq_lens)
    assert plan.rows.tolist() == [3, 5, 0, 7, 1, 2, 6]
    assert plan.levels[0].cu_rows.tolist() == [0, 4, 7]
    assert plan.levels[1].cu_rows.tolist() == [0, 2, 4, 5, 7]
    assert plan.levels[1].seq_lens.tolist() == [0, 8, 0, 4]
    assert plan.levels[1].block_table.tolist() == [[0, 0], [2, 3], [0, 0], [6, 0]]


def test_an_empty_forest_has_no_plan() -> None:
    for shape in ((0, 0), (0, 3), (2, 3)):
        seq_lens = np.full(shape[0], 3, dtype=np.int32)
        forest = Forest((), shape[0], BLOCK_SIZE)
        assert make_plan(forest, np.ones(shape, dtype=np.int32), seq_lens) is None


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
@given(forests())
def test_any_forest_can_be_put_together_again(case: tuple[Forest, np.ndarray, np.ndarray]) -> None:
    forest, block_table, seq_lens = case
    forest.validate()
    before = block_table.copy(), seq_lens.copy()
    plan = make_plan(forest, block_table, seq_lens)
    assert (block_table == before[0]).all() and (seq_lens == before[1]).all()
    if not forest.levels:
        assert plan is None
    else:
        assert plan is not None
        check_plan(plan, forest, block_table, seq_lens)


@settings(max_examples=200, deadline=None)
@given(forests())
def test_the_forest_found_has_a_sound_plan(case: tuple[Forest, np.ndarray, np.ndarray]) -> None:
    _, block_table, seq_lens = case
    forest = find_forest(block_table, np.maximum(seq_lens - 1, 0), BLOCK_SIZE)
    plan = make_plan(forest, block_table, seq_lens)
    if plan is not None:
        check_plan(plan, forest, block_table, seq_lens)


def test_the_plan_owns_its_arrays() -> None:
    block_table = np.array([[1, 2], [1, 3]], dtype=np.int32)
    seq_lens = np.array([6, 7], dtype=np.int32)
    plan = make_plan(Forest(((group(0, 1, 0, 1),),), 2, BLOCK_SIZE), block_table, seq_lens)
    assert plan is not None
    block_table[:], seq_lens[:] = 99, 0
    assert plan.levels[0].block_table.tolist() == [[1]]
    assert plan.context_block_table.tolist() == [[2], [3]]
    assert plan.context_lens.tolist() == [2, 3]


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
        make_plan(forest, np.ones((rows, 3), dtype=dtype), np.array(seq_lens, dtype=np.int32))
