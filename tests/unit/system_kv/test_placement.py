"""place: blocks are the nodes of a trie, one per KV cache group; under a window those that vLLM
looks for. budget_error: at the very boundary, with the numbers.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_relay.system_kv.placement import (
    CacheGroup,
    Placement,
    Placer,
    alignment,
    budget_error,
    kept_tokens,
    pinned_ids,
)
from vllm_relay.system_kv.placement import place as place_groups


def group(block_size: int, window: int | None = None) -> CacheGroup:
    return CacheGroup(block_size=block_size, window=window, layers=())


def place(prompts: Sequence[Sequence[int]], size: int, salts: list[str | None]) -> list[Placement]:
    """Placements in the only group, without a window."""
    return [placed for (placed,) in place_groups(prompts, [group(size)], salts)]


def common(a: list[int], b: list[int], block_size: int) -> int:
    """Full blocks of tokens that two prompts begin with in common."""
    blocks = 0
    while blocks < min(len(a), len(b)) // block_size and (
        a[: (blocks + 1) * block_size] == b[: (blocks + 1) * block_size]
    ):
        blocks += 1
    return blocks


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Up to eight prompts, many of which go on from the beginning of an earlier one."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(0, 8))):
        earlier = draw(st.sampled_from(made)) if made and draw(st.booleans()) else []
        begin = earlier[: draw(st.integers(0, len(earlier)))]
        made.append(begin + draw(st.lists(st.integers(0, 2), max_size=12)))
    return made


@settings(max_examples=500, deadline=None)
@given(prompts(), st.integers(1, 4))
def test_blocks_are_the_nodes_of_a_trie(made: list[list[int]], size: int) -> None:
    trie: dict[Any, Any] = {}
    nodes = 0
    expected = []
    for i, tokens in enumerate(made):
        node, ids = trie, []
        for block in range(len(tokens) // size):
            key = tuple(tokens[block * size : (block + 1) * size])
            if key not in node:
                nodes += 1
                node[key] = (nodes, {})  # id 0 is the engine's null block
            id, node = node[key]
            ids.append(id)
        shared = max((common(tokens, earlier, size) for earlier in made[:i]), default=0)
        expected.append(Placement(tuple(ids), shared))
    assert place(made, size, [None] * len(made)) == expected


@settings(max_examples=500, deadline=None)
@given(prompts(), st.integers(1, 4))
def test_ids_have_no_gaps_and_two_prompts_share_what_they_have_in_common(
    made: list[list[int]], size: int
) -> None:
    placements = place(made, size, [None] * len(made))
    ids = {id for placement in placements for id in placement.block_ids}
    assert ids == set(range(1, len(ids) + 1))
    new = [id for placement in placements for id in placement.block_ids[placement.shared :]]
    assert new == sorted(ids)  # each block is written once, by the first prompt that has it
    for tokens, placement in zip(made, placements, strict=True):
        assert len(placement.block_ids) == len(tokens) // size
        assert len(set(placement.block_ids)) == len(placement.block_ids)
        for others, other in zip(made, placements, strict=True):
            shared = common(tokens, others, size)
            assert placement.block_ids[:shared] == other.block_ids[:shared]
            assert not {*placement.block_ids[shared:]} & {*other.block_ids[shared:]}


def test_an_example_by_hand() -> None:
    a, b, c = [1, 2], [3, 4], [5, 6]
    placements = place([a + b + c, a + b + [9], a + c, b, a, a + b + c, [1]], 2, [None] * 7)
    assert placements == [
        Placement((1, 2, 3), 0),
        Placement((1, 2), 2),  # its last token has no block
        Placement((1, 4), 1),
        Placement((5,), 0),  # the same tokens as block 2, at another position
        Placement((1,), 1),
        Placement((1, 2, 3), 3),
        Placement((), 0),
    ]


def test_repeated_tokens_get_blocks_of_their_own() -> None:
    assert place([[7] * 9], 2, [None]) == [Placement((1, 2, 3, 4), 0)]


def test_prompts_of_other_salts_share_nothing() -> None:
    salts = [None, "a", "b", "a", None, "1"]
    assert [placement.block_ids for placement in place([[7] * 4] * 6, 2, salts)] == [
        *([(1, 2), (3, 4), (5, 6)]),
        *([(3, 4), (1, 2), (7, 8)]),
    ]


def test_the_kind_of_sequence_does_not_matter() -> None:
    assert place([(1, 2, 3), range(1, 4)], 2, [None] * 2) == [
        Placement((1,), 0),
        Placement((1,), 1),
    ]


# Several groups


@st.composite
def groups(draw: st.DrawFn) -> list[CacheGroup]:
    windows = st.one_of(st.none(), st.integers(1, 12))
    return [
        group(draw(st.sampled_from([1, 2, 4])), draw(windows))
        for _ in range(draw(st.integers(1, 3)))
    ]


def hit(tokens: Sequence[int], limit: int, of: list[CacheGroup], blocks: list[set[Any]]) -> int:
    """Tokens that vLLM finds of a prompt, at most ``limit``; ``blocks``: cached ones, by group.

    As its coordinator: the longest multiple of all block sizes for which each group has all of its
    blocks, or under a window those that the next token sees.
    """
    step = alignment(of)
    for length in range(limit // step * step, 0, -step):
        needed = []
        for number, one in enumerate(of):
            first = 0 if one.window is None else max(0, length - one.window + 1) // one.block_size
            needed += [
                (number, tuple(tokens[: (column + 1) * one.block_size]))
                for column in range(first, length // one.block_size)
            ]
        if all(block[1] in blocks[block[0]] for block in needed):
            return length
    return 0


@settings(max_examples=500, deadline=None)
@given(prompts(), groups())
def test_requests_behind_a_prompt_find_all_of_it_and_the_prompt_itself_all_it_can(
    made: list[list[int]], of: list[CacheGroup]
) -> None:
    placements = place_groups(made, of, [None] * len(made))
    cached: list[set[Any]] = [set() for _ in of]
    holder: dict[int, Any] = {}
    for tokens, placed in zip(made, placements, strict=True):
        for number, (one, where) in enumerate(zip(of, placed, strict=True)):
            for column, id in enumerate(where.block_ids):
                block = number, tuple(tokens[: (column + 1) * one.block_size])
                if id:
                    cached[number].add(block[1])
                    assert holder.setdefault(id, block) == block  # one block, one content
    assert pinned_ids(placements) == set(range(1, len(holder) + 1))
    step = alignment(of)
    for tokens, placed in zip(made, placements, strict=True):
        whole = len(tokens) // step * step
        assert hit([*tokens, 7], len(tokens), of, cached) == whole
        assert hit(tokens, len(tokens) - 1, of, cached) == max(0, len(tokens) - 1) // step * step
        for one, where in zip(of, placed, strict=True):
            assert len(where.block_ids) == whole // one.block_size
            assert 0 <= where.shared <= len(where.block_ids)
    # Each block is written by the first prompt that has it.
    written: set[int] = set()
    for placed in placements:
        for where in placed:
            assert {*where.block_ids[: where.shared]} <= written | {0}
            assert 0 not in where.block_ids[where.shared :]
            written |= {*where.block_ids[where.shared :]}


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 2000), groups())
def test_a_file_keeps_what_engines_with_larger_blocks_need(
    tokens: int, loaded: list[CacheGroup]
) -> None:
    loaded = [group(64 * one.block_size, one.window) for one in loaded]  # hits at up to 256 tokens
    (placed,) = place_groups([range(tokens)], loaded, [None])
    for one, where in zip(loaded, placed, strict=True):
        kept = kept_tokens(group(16, one.window), [group(16)])
        if kept is not None and where.shared < len(where.block_ids):
            assert where.shared * one.block_size >= max(0, tokens - kept)


def test_an_example_with_a_window_by_hand() -> None:
    # Hits at multiples of 4. A query sees 3 tokens before its own: 2 blocks of 2.
    of, a = [group(4), group(2, 4)], [1, 2, 3, 4, 5, 6, 7, 8]
    (whole, windowed), (other, beside) = place_groups([[*a, 9], [*a, 9, 9, 9, 9]], of, [None] * 2)
    assert whole == Placement((1, 2), 0)
    assert windowed == Placement((0, 0, 3, 4), 2)
    assert other == Placement((1, 2, 5), 2)
    # The prompt alone is found up to its 8th token, so blocks 2 and 3 are there for it, too.
    assert beside == Placement((0, 0, 3, 4, 6, 7), 4)


# The budget


def test_pins_may_take_all_of_their_share_and_not_a_block_more() -> None:
    assert budget_error(50, 100, 0.5, 16, 1) is None
    assert budget_error(51, 100, 0.5, 16, 1) == (
        "system KVs need 51 of 100 KV cache blocks (51%); system_kv.budget allows 50%, 50 blocks: "
        "enlarge the KV cache or the budget, or load fewer"
    )


def test_a_share_of_an_odd_number_is_rounded_down() -> None:
    assert budget_error(50, 101, 0.5, 16, 1) is None
    assert "allows 50%, 50 blocks" in str(budget_error(51, 101, 0.5, 16, 1))


def test_shares_of_nothing_and_of_everything() -> None:
    assert budget_error(0, 100, 0.0, 16, 1) is None
    assert "allows 0%, 0 blocks" in str(budget_error(1, 100, 0.0, 16, 1))
    assert budget_error(99, 100, 1.0, 16, 1) is None
    assert "need 101 of 100 KV cache blocks (101%)" in str(budget_error(101, 100, 1, 16, 1))


@pytest.mark.parametrize(
    ("share", "usable"),
    [
        (0.25, 12_344),
        (0.1, 1000),
        (0.3, 1000),
        (0.7, 1000),
        (0.29, 100),  # 28.999… in binary
        (0.57, 100),
        (0.58, 100),
    ],
)
def test_a_share_is_what_its_decimal_digits_say(share: float, usable: int) -> None:
    allowed = int(Fraction(str(share)) * usable)
    assert budget_error(allowed, usable, share, 16, 1) is None
    assert budget_error(allowed + 1, usable, share, 16, 1) is not None


@pytest.mark.parametrize(("max_model_len", "longest"), [(160, 10), (145, 10), (161, 11), (1, 1)])
def test_one_longest_request_must_fit_beside_the_pins(max_model_len: int, longest: int) -> None:
    assert budget_error(100 - longest, 100, 1.0, max_model_len, longest) is None
    assert budget_error(100 - longest + 1, 100, 1.0, max_model_len, longest) == (
        f"system KVs need {101 - longest} of 100 KV cache blocks; the other {longest - 1} cannot "
        f"hold one request of max_model_len {max_model_len} ({longest} blocks), which would wait "
        "for ever: enlarge the KV cache, lower --max-model-len, or load fewer"
    )


def test_large_numbers_are_readable() -> None:
    message = str(budget_error(123_456, 200_000, 0.5, 16, 1))
    assert "need 123,456 of 200,000 KV cache blocks (62%)" in message and "100,000" in message
    message = str(budget_error(9_000, 10_000, 0.9, 131_072, 8_192))
    assert "the other 1,000 cannot" in message and "131,072 (8,192 blocks)" in message


def test_a_prompt_that_does_not_fit_changes_nothing() -> None:
    placer = Placer([group(2)])
    assert placer.add([1, 2, 3, 4], None, room=2) == (Placement((1, 2), 0),)
    assert placer.add([1, 2, 5, 6, 7, 8], None, room=3) is None
    assert placer.add([1, 2, 5, 6], None, room=3) == (Placement((1, 3), 1),)
    assert placer.add([1, 2, 3, 4], None, room=3) == (Placement((1, 2), 2),)
