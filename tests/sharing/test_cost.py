"""The decision: which groups are worth relaying."""

import numpy as np
import pytest

from vllm_relay.sharing import Forest, Group, Segment, select, tokens_saved

BLOCK_SIZE = 16


def group(start: int, blocks: int, *rows: int) -> Group:
    return Group(Segment(start, blocks), np.array(rows, dtype=np.int32))


def test_tokens_saved_is_one_read_less_than_members() -> None:
    assert tokens_saved(group(0, 10, 0, 1, 2), BLOCK_SIZE) == 2 * 160


def test_select_keeps_what_reaches_the_threshold() -> None:
    small, large = group(0, 1, 0, 1), group(0, 10, 2, 3)
    forest = Forest(((small, large),), 5, BLOCK_SIZE)
    assert select(forest, min_saved_tokens=0).levels == ((small, large),)
    assert select(forest, min_saved_tokens=16).levels == ((small, large),)
    assert select(forest, min_saved_tokens=17).levels == ((large,),)
    kept = select(forest, min_saved_tokens=161)
    assert (kept.levels, kept.num_rows, kept.block_size) == ((), 5, BLOCK_SIZE)


def test_select_keeps_a_group_for_what_is_nested_in_it() -> None:
    outer, other, inner = group(0, 1, 0, 1, 2), group(0, 1, 3, 4), group(1, 50, 1, 2)
    forest = Forest(((outer, other), (inner,)), 5, BLOCK_SIZE)
    kept = select(forest, min_saved_tokens=100)
    kept.validate()
    assert kept.levels == ((outer,), (inner,))
    assert select(forest, min_saved_tokens=801).levels == ()
    thin = Forest(((group(0, 50, 0, 1, 2),), (group(50, 1, 1, 2),)), 5, BLOCK_SIZE)
    assert select(thin, min_saved_tokens=100).levels == (thin.levels[0],)


def test_select_of_nothing_is_nothing() -> None:
    assert select(Forest((), 0, BLOCK_SIZE), min_saved_tokens=0).levels == ()


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^min_saved_tokens must be >= 0, got -1"):
        select(Forest((), 0, BLOCK_SIZE), min_saved_tokens=-1)
