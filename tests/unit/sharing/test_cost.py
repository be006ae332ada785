"""Predicted time against the formula written out, and what makes a group pay."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.sharing.forests import check_forest
from vllm_relay.sharing import (
    Costs,
    Forest,
    Group,
    KernelCosts,
    Segment,
    StepShape,
    build_trie,
    choose,
    predict,
    predict_stock,
    reads,
)
from vllm_relay.sharing.cost import far_tokens

BLOCK_SIZE = 16
# Primes and halves, so that a term that is missing or counted twice shows.
COSTS = Costs(
    stock=KernelCosts(call=2.0, row=1.5, token=3.0, first=5.0, read=7.0, pair=11.0, far=61.0),
    context=KernelCosts(call=13.0, row=0.5, token=17.0, first=19.0, read=23.0, pair=29.0, far=67.0),
    system=KernelCosts(call=31.0, token=37.0, first=41.0, pair=43.0),
    near=45.0,
    fusion=47.0,
    step=53.0,
    level=59.0,
)


def group(start: int, blocks: int, *rows: int) -> Group:
    return Group(Segment(start, blocks), np.array(rows, dtype=np.int32))


def shape(*rows: tuple[list[int], int, int]) -> StepShape:
    """Requests of (blocks, length, query tokens)."""
    table = np.zeros((len(rows), max(len(blocks) for blocks, _, _ in rows)), dtype=np.int32)
    for i, (blocks, _, _) in enumerate(rows):
        table[i, : len(blocks)] = blocks
    lens, queries = (np.array(x, dtype=np.int32) for x in list(zip(*rows, strict=True))[1:])
    trie = build_trie(table, (lens - queries).astype(np.int32), BLOCK_SIZE)
    return StepShape(trie, BLOCK_SIZE, lens, queries)


# Two blocks of all three, one more of the first two, and their own.
THREE = shape(([1, 2, 3, 9], 60, 1), ([1, 2, 3], 50, 2), ([1, 2], 40, 1))


def test_a_step_is_counted_once_and_as_vllm_reads_it() -> None:
    assert THREE.tokens_stock() == 150
    assert THREE.tokens_once() == 150 - 2 * 32 - 16
    np.testing.assert_allclose(THREE.shares(), [32 / 3 + 8 + 12, 32 / 3 + 8 + 2, 32 / 3 + 8])
    assert THREE.shares().sum() == pytest.approx(THREE.tokens_once())


def test_predicted_time_of_vllms_own_attention() -> None:
    pairs, far = 60 + 2 * 50 + 40, 15 + 5
    expected = 2 + 1.5 * 3 + 3 * 4 + 5 * 70 + 7 * 150 + 61 * far + 11 * pairs
    assert predict_stock(THREE, COSTS) == pytest.approx(expected)


def test_predicted_time_of_our_kernels_without_a_group() -> None:
    pairs, far = 60 + 2 * 50 + 40, 15 + 5
    expected = 13 + 0.5 * 3 + 17 * 4 + 19 * 70 + 23 * 150 + 67 * far + 29 * pairs
    assert predict(Forest((), 3, BLOCK_SIZE), THREE, COSTS) == pytest.approx(expected)


def test_predicted_time_with_two_levels_and_a_request_in_one() -> None:
    forest = Forest(((group(0, 2, 0, 1, 2),), (group(2, 1, 0, 1),)), 3, BLOCK_SIZE)
    check_forest(forest)
    system = 31 + 41 * 32 + (37 + 43 * 32) * 4 + 31 + 41 * 16 + (37 + 43 * 16) * 3
    left, first = np.array([12, 2, 8]), np.array([12, 2, 8])
    context = 13 + 0.5 * 3 + 17 * 4 + 19 * first.sum() + 23 * left.sum() + 29 * (12 + 2 * 2 + 8)
    fusion = 47 * (3 + 2 * 3 + 2)
    expected = system + context + fusion + 53 + 2 * 59
    assert predict(forest, THREE, COSTS) == pytest.approx(expected)


def test_a_prefix_in_no_group_is_shared_out_to_those_who_read_it() -> None:
    forest = Forest(((group(0, 2, 0, 1),),), 3, BLOCK_SIZE)
    system = 31 + 41 * 32 + (37 + 43 * 32) * 3
    context = 13 + 0.5 * 3 + 17 * 3 + 19 * (8 + 12 + 8 + 2) + 23 * (28 + 18) + 29 * (28 + 2 * 18)
    alone = 17 + 19 * (32 / 3 + 8) + 23 * 40 + 29 * 40
    expected = alone + system + context + 47 * (2 * 3 + 1) + 53 + 59
    assert predict(forest, THREE, COSTS) == pytest.approx(expected)


def test_a_context_beyond_the_cache_is_charged_for_it() -> None:
    near = replace(COSTS, near=20.0)
    forest = Forest(((group(0, 2, 0, 1),),), 3, BLOCK_SIZE)
    # Contexts of 28 and 18 tokens, and 40 tokens of the ungrouped request.
    expected = predict(forest, THREE, replace(COSTS, near=100.0)) + 67 * (28 - 20 + 40 - 20)
    assert predict(forest, THREE, near) == pytest.approx(expected)


def test_a_context_that_evicts_itself_is_far_as_a_whole() -> None:
    tokens = np.array([70, 115, 160, 300])
    np.testing.assert_allclose(far_tokens(tokens, 100.0, evicts=True), [0, 115 / 2, 160, 300])
    evicts = replace(COSTS, near=20.0, evicts=True)
    forest = Forest(((group(0, 2, 0, 1),),), 3, BLOCK_SIZE)
    # 28 of 20 tokens: 7/9 of them; 18: 2/9; 40: all.
    far = 28 * (1.4 - 0.7) / 0.9 + 18 * (0.9 - 0.7) / 0.9 + 40
    expected = predict(forest, THREE, replace(COSTS, near=100.0)) + 67 * far
    assert predict(forest, THREE, evicts) == pytest.approx(expected)


def test_packed_segments_pay_for_their_packing() -> None:
    packed = KernelCosts(call=71.0, token=73.0, first=79.0, pair=37.0)
    given = replace(COSTS, packed=packed, copy=576.0)
    assert given.with_packing(64).system == replace(packed, first=79.0 + 9.0)
    # 8 queries save 48 per token, which are spent on 38 more for the first read, and the packing.
    assert given.with_packing(57) == given
    assert COSTS.with_packing(64) == COSTS


def test_a_margin_slows_our_kernels_alone() -> None:
    forest = Forest(((group(0, 2, 0, 1, 2),),), 3, BLOCK_SIZE)
    slower = COSTS.with_margin(0.5)
    assert predict_stock(THREE, slower) == predict_stock(THREE, COSTS)
    assert predict(forest, THREE, slower) == pytest.approx(1.5 * predict(forest, THREE, COSTS))


def test_what_a_group_has_to_save_can_be_given() -> None:
    def members(least: int) -> list[list[int]]:
        forest = choose(THREE, reads(least), 1).forest
        return [g.rows.tolist() for level in forest.levels for g in level]

    assert members(0) == members(64) == [[0, 1, 2]]  # two reads less of two blocks
    assert members(65) == []


def test_counting_reads_prefers_fewer_groups() -> None:
    two = shape(([1, 2, 3], 60, 1), ([1, 2, 3], 60, 1))
    forest = choose(two, reads(), 3).forest
    assert [(g.segment, g.rows.tolist()) for level in forest.levels for g in level] == [
        (Segment(0, 3), [0, 1])
    ]


def test_no_levels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^max_levels must be >= 1, got 0"):
        choose(THREE, COSTS, 0)
