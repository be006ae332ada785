"""Pinned blocks: what counts as a request's hit."""

import pytest

from vllm_relay.system_kv.pinned_blocks import _hit_length


@pytest.mark.parametrize(
    ("pinned", "held", "hit"),
    [
        ((1, 2, 3), (1, 2, 3, 9), 3),
        ((1, 2, 3), (1, 2, 9), 2),
        ((1, 2, 3), (9, 8, 7), 0),
        ((1, 2, 3), (), 0),
        # Null blocks before a window are nobody's.
        ((0, 0, 3, 4), (0, 0, 3, 4, 9), 4),
        ((0, 0, 3, 4), (0, 0, 0, 4, 9), 4),
        ((0, 0, 3, 4), (0, 0, 8, 9), 0),
    ],
)
def test_a_hit_ends_with_the_last_pinned_block_that_a_request_holds(
    pinned: tuple[int, ...], held: tuple[int, ...], hit: int
) -> None:
    assert _hit_length(pinned, held) == hit
