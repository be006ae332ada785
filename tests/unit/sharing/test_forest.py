"""find_forest against examples and against brute force over all ways to group a few rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sharing.forests import check_forest, find_forest
from vllm_relay.sharing import Forest, Group, Segment, build_trie
from vllm_relay.sharing.trie import limited

BLOCK_SIZE = 4


def table(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


def lens(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def groups_of(forest: Forest) -> list[tuple[list[int], int]]:
    check_forest(forest)
    assert len(forest.levels) <= 1
    return [(g.rows.tolist(), g.segment.blocks) for level in forest.levels for g in level]


def find(block_table: np.ndarray, computed_lens: np.ndarray) -> list[tuple[list[int], int]]:
    return groups_of(find_forest(block_table, computed_lens, BLOCK_SIZE))


def test_nothing_shared() -> None:
    forest = find_forest(table([1, 2], [3, 2]), lens(8, 8), BLOCK_SIZE)
    assert forest.levels == ()
    assert (forest.num_rows, forest.block_size) == (2, BLOCK_SIZE)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (1, 5), (3, 0)])
def test_no_rows_one_row_no_columns(shape: tuple[int, int]) -> None:
    assert find(np.ones(shape, dtype=np.int32), np.full(shape[0], 20, dtype=np.int32)) == []


def test_one_group_amid_loners_in_any_row_order() -> None:
    blocks = table([9, 8, 7], [1, 2, 3], [6, 5, 4], [1, 2, 10])
    assert find(blocks, lens(12, 12, 12, 12)) == [([1, 3], 2)]


def test_groups_with_prefixes_of_different_lengths() -> None:
    blocks = table([1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 8, 9], [4, 10, 11])
    assert find(blocks, lens(12, 12, 12, 12, 12)) == [([0, 2], 2), ([1, 3, 4], 1)]


def test_a_partly_filled_block_is_not_shared() -> None:
    blocks = table([1, 2, 3], [1, 2, 3])
    assert find(blocks, lens(11, 12)) == [([0, 1], 2)]
    assert find(blocks, lens(3, 12)) == []


def test_stale_columns_are_not_read() -> None:
    assert find(table([1, 2, 9, 9], [1, 3, 9, 9], [1, 2, 9, 9]), lens(8, 8, 8)) == [([0, 1, 2], 1)]
    assert find(table([1, 2, 9, 9], [1, 2, 9, 9]), lens(4, 16)) == [([0, 1], 1)]


def test_padded_rows_have_no_length() -> None:
    assert find(table([1, 2], [1, 2], [1, 2]), lens(8, 0, 8)) == [([0, 2], 2)]


def test_the_null_block_ends_a_row() -> None:
    assert find(table([1, 0, 3], [1, 0, 3]), lens(12, 12)) == [([0, 1], 1)]
    assert find(table([0, 2, 3], [0, 2, 3]), lens(12, 12)) == []
    assert find(table([1, -1, 3], [1, 2, 3], [1, 2, 3]), lens(12, 12, 12)) == [([1, 2], 3)]


def test_identical_requests_share_like_any_other() -> None:
    assert find(table([1, 2, 3], [1, 2, 3], [1, 2, 3]), lens(12, 12, 12)) == [([0, 1, 2], 3)]


def test_the_same_id_in_another_column_is_not_shared() -> None:
    assert find(table([1, 2, 3], [3, 1, 2]), lens(12, 12)) == []
    assert find(table([1, 2, 3], [4, 2, 3]), lens(12, 12)) == []


def test_lengths_beyond_the_table_are_clamped() -> None:
    assert find(table([1, 2], [1, 2]), lens(4000, 9)) == [([0, 1], 2)]


def test_one_shallow_group_beats_two_deep_ones() -> None:
    # Together 3 * 3 blocks; in pairs 4 + 4.
    blocks = table([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5])
    assert find(blocks, lens(16, 16, 16, 16)) == [([0, 1, 2, 3], 3)]


def test_two_deep_groups_beat_one_shallow() -> None:
    blocks = table([1, 2, 3, 4], [1, 2, 3, 4], [1, 5, 6, 7], [1, 5, 6, 7])
    assert find(blocks, lens(16, 16, 16, 16)) == [([0, 1], 4), ([2, 3], 4)]


def test_what_a_deep_group_leaves_over_is_grouped_above_it() -> None:
    # All four save 3 * 2 and the pair alone 5; the pair and the other two save 5 + 2.
    blocks = table([1, 2, 3, 4, 5], [1, 2, 9, 0, 0], [1, 2, 3, 4, 5], [1, 2, 8, 0, 0])
    assert find(blocks, lens(20, 12, 20, 12)) == [([0, 2], 5), ([1, 3], 2)]


def test_among_equals_fewer_groups_then_more_members() -> None:
    # Four rows at 2 blocks, or two pairs at 3: 6 either way.
    pairs = table([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 4])
    assert find(pairs, lens(12, 12, 12, 12)) == [([0, 1, 2, 3], 2)]
    # Three rows at 1 block, or two of them at 2.
    assert find(table([1, 2], [1, 2], [1, 3]), lens(8, 8, 8)) == [([0, 1, 2], 1)]


def test_a_chain_deeper_than_the_recursion_limit() -> None:
    rows = 1200
    blocks = np.arange(rows * rows, dtype=np.int32).reshape(rows, rows) + rows + 1
    spine = np.arange(1, rows + 1, dtype=np.int32)
    for row in range(rows):
        blocks[row, : row + 1] = spine[: row + 1]
    whole = np.full(rows, rows * BLOCK_SIZE, dtype=np.int32)
    forest = find_forest(blocks, whole, BLOCK_SIZE)
    check_forest(forest)
    # Of so many nodes only some are planned with; the first rows are left out by them.
    assert sum(len(g.rows) for g in forest.levels[0]) > 0.97 * rows


@pytest.mark.parametrize("kind", ["chain", "random"])
def test_a_limited_trie_has_nodes_of_the_whole_one_and_repeats_few_blocks_more(kind: str) -> None:
    rng = np.random.default_rng(3)
    rows = 200
    ends = np.arange(rows) if kind == "chain" else rng.integers(0, 90, rows)
    blocks = np.arange(rows * rows, dtype=np.int32).reshape(rows, rows) + 1000
    for row, end in enumerate(ends.tolist()):
        source = 0 if kind == "chain" else rng.integers(0, row + 1)
        blocks[row, : end + 1] = blocks[source, : end + 1]
        if row == 0:
            blocks[0] = np.arange(1, rows + 1)
    whole = build_trie(blocks, np.full(rows, rows * BLOCK_SIZE, dtype=np.int32), BLOCK_SIZE)
    total = sum(whole.heights())
    assert limited(whole, total) is whole
    few = limited(whole, total // 4)
    assert sum(few.heights()) <= total // 4
    nodes = set(zip(whole.depth, whole.count, strict=True))
    assert nodes >= set(zip(few.depth, few.count, strict=True))
    assert sorted(np.concatenate(few.rows)) == sorted(np.concatenate(whole.rows))
    for node in range(1, len(few.depth)):
        below = len(few.rows[node]) + sum(
            few.count[child] for child, parent in enumerate(few.parent) if parent == node
        )
        assert few.count[node] == below and few.depth[node] > few.depth[few.parent[node]]
    assert few.blocks_repeated() > 0.9 * whole.blocks_repeated()


def test_a_view_of_a_larger_table() -> None:
    larger = np.zeros((6, 10), dtype=np.int32)
    larger[::2, 1:7:2] = table([1, 2, 3], [1, 2, 4], [5, 6, 7])
    assert find(larger[::2, 1:7:2], lens(12, 12, 12)) == [([0, 1], 2)]


def brute_force(block_table: np.ndarray, usable: list[int]) -> tuple[int, int, int]:
    """Best (reads saved, -groups, members) over all partitions of the rows."""

    def common(rows: list[int]) -> int:
        depth = min(usable[r] for r in rows)
        for column in range(depth):
            if len({int(block_table[r, column]) for r in rows}) > 1:
                return column
        return depth

    def search(row: int, parts: list[list[int]]) -> tuple[int, int, int]:
        if row == len(usable):
            groups = [part for part in parts if len(part) > 1 and common(part) > 0]
            saved = sum((len(part) - 1) * common(part) for part in groups)
            return saved, -len(groups), sum(map(len, groups))
        options = []
        for i in range(len(parts)):
            options.append(search(row + 1, [*parts[:i], [*parts[i], row], *parts[i + 1 :]]))
        return max([*options, search(row + 1, [*parts, [row]])])

    return search(0, [])


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    num_rows, num_columns = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    ids = st.sampled_from([1, 1, 1, 2, 2, 3, 0, -1])
    rows = draw(
        st.lists(
            st.lists(ids, min_size=num_columns, max_size=num_columns),
            min_size=num_rows,
            max_size=num_rows,
        )
    )
    most = num_columns * BLOCK_SIZE + 2
    tokens = st.one_of(st.just(most), st.integers(0, most))
    computed = draw(st.lists(tokens, min_size=num_rows, max_size=num_rows))
    return np.array(rows, dtype=np.int32).reshape(num_rows, num_columns), lens(*computed)


@settings(max_examples=600, deadline=None)
@given(batches())
def test_optimal_disjoint_and_within_computed_blocks(batch: tuple[np.ndarray, np.ndarray]) -> None:
    block_table, computed = batch
    before = block_table.copy(), computed.copy()
    groups = groups_of(find_forest(block_table, computed, BLOCK_SIZE))
    assert (block_table == before[0]).all() and (computed == before[1]).all()

    usable = []
    for ids, tokens in zip(block_table.tolist(), computed.tolist(), strict=True):
        full = ids[: tokens // BLOCK_SIZE]
        usable.append(next((i for i, block in enumerate(full) if block <= 0), len(full)))
    for rows, depth in groups:
        assert depth <= min(usable[r] for r in rows)
        assert len({tuple(block_table[r, :depth]) for r in rows}) == 1
    found = (
        sum((len(rows) - 1) * depth for rows, depth in groups),
        -len(groups),
        sum(len(rows) for rows, _ in groups),
    )
    assert found == brute_force(block_table, usable)


@settings(max_examples=100, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_row_order_does_not_change_what_is_saved(batch, random) -> None:
    block_table, computed = batch
    order = list(range(len(computed)))
    random.shuffle(order)

    def saved(groups: list[tuple[list[int], int]]) -> int:
        return sum((len(rows) - 1) * depth for rows, depth in groups)

    assert saved(find(block_table, computed)) == saved(find(block_table[order], computed[order]))


@pytest.mark.parametrize(
    ("block_table", "computed_lens", "block_size", "name"),
    [
        (np.ones((2, 3), np.int64), lens(4, 4), 4, "block_table"),
        (np.ones(3, np.int32), lens(4, 4), 4, "block_table"),
        ([[1], [1]], lens(4, 4), 4, "block_table"),
        (np.ones((2, 3), np.int32), lens(4, 4, 4), 4, "computed lengths"),
        (np.ones((2, 3), np.int32), np.ones(2, np.int64), 4, "computed lengths"),
        (np.ones((2, 3), np.int32), lens(4, -1), 4, "computed lengths"),
        (np.ones((2, 3), np.int32), lens(4, 4), 0, "block_size"),
    ],
)
def test_bad_input_is_named(block_table, computed_lens, block_size: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        find_forest(block_table, computed_lens, block_size)


def group(start: int, blocks: int, *rows: int) -> Group:
    return Group(Segment(start, blocks), np.array(rows, dtype=np.int32))


def test_two_levels_keep_the_rules() -> None:
    inner = (group(2, 3, 0, 1), group(1, 1, 4, 6))
    outer = (group(0, 2, 0, 1, 3), group(0, 1, 4, 5, 6))
    check_forest(Forest((outer, inner), 7, BLOCK_SIZE))


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (((),), "empty"),
        (((group(0, 2, 0),),), "rows must be int32"),
        (((group(0, 2, 1, 0),),), "ascend"),
        (((group(0, 2, 0, 9),),), "ascend"),
        (((group(0, 0, 0, 1),),), "at least one block"),
        (((group(1, 2, 0, 1),),), "where the one above ends"),
        (((group(0, 2, 0, 1), group(0, 2, 1, 2)),), "another group of this level"),
        (((group(0, 2, 0, 1),), (group(2, 1, 1, 2),)), "one group of the level above"),
        (((group(0, 2, 0, 1), group(0, 2, 2, 3)), (group(2, 1, 1, 2),)), "one group of the level"),
        (((group(0, 2, 0, 1),), (group(3, 1, 0, 1),)), "where the one above ends"),
    ],
)
def test_the_broken_rule_is_named(levels, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_forest(Forest(levels, 5, BLOCK_SIZE))
