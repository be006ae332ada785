"""Which prefixes deserve a file: common parts, once, the hottest first, in bounded memory."""

import random

import pytest

from tests.unit.system_kv.pool_traffic import Prompt, chain
from vllm_relay.system_kv.hotness import Hotness
from vllm_relay.system_kv.known_prefixes import KnownPrefixes

Parts = tuple[tuple[str, int], ...]


def _tokens(prompt: Prompt) -> list[int]:
    """Two token ids per block, told by its hash."""
    return [x for name in prompt for x in (name[0], name[1])]


def _chosen(requests: list[Parts], most: int = 100, known: int = 1000) -> list[Prompt]:
    """The hashes of the prefixes chosen after these requests."""
    hotness = Hotness(capacity=1000, half_life=10**6, most=1000)
    prefixes = KnownPrefixes(block_size=2, most=known)
    for parts in requests:
        prompt = chain(*parts)
        hotness.ask(prompt)
        prefixes.add(prompt, [*_tokens(prompt), 7])
        assert len(prefixes) <= known
    found = prefixes.choose(hotness.hottest(2.0, most), most)
    assert all(list(prefix.token_ids) == _tokens(list(prefix.hashes)) for prefix in found)
    return [list(prefix.hashes) for prefix in found]


def _own(count: int, *shared: tuple[str, int]) -> list[Parts]:
    """Requests under a prefix, each with an end of its own."""
    return [(*shared, (f"own {i} of {shared}", 3)) for i in range(count)]


def test_prefixes_that_differ_at_the_end_merge_to_their_common_part() -> None:
    assert _chosen(_own(5, ("acme", 8))) == [chain(("acme", 8))]


def test_what_came_twice_is_not_hot() -> None:
    assert _chosen(_own(2, ("acme", 8))) == []


def test_the_hottest_come_first() -> None:
    requests = [*_own(3, ("a", 4)), *_own(9, ("b", 4)), *_own(6, ("c", 4))]
    random.Random(0).shuffle(requests)
    assert _chosen(requests) == [chain((name, 4)) for name in "bca"]
    assert _chosen(requests, most=9) == [chain((name, 4)) for name in "bc"]


def test_a_longer_hot_prefix_stands_for_the_one_that_it_begins_with() -> None:
    requests = [*_own(20, ("acme", 4)), *_own(6, ("acme", 4), ("tools", 8))]
    assert _chosen(requests) == [chain(("acme", 4), ("tools", 8))]


def test_an_end_that_few_came_under_merges_to_the_common_part() -> None:
    """Its file would be 22 blocks, of which 20 are in another, for 2 blocks that 4 came under."""
    requests = [*_own(20, ("acme", 20)), *_own(4, ("acme", 20), ("end", 2))]
    assert _chosen(requests) == [chain(("acme", 20))]


@pytest.mark.parametrize("known", [1, 5, 11])
def test_ends_are_forgotten_before_beginnings(known: int) -> None:
    assert _chosen(_own(5, ("acme", 8)), known=known) == [chain(("acme", 8))[:known]]


def test_the_hottest_counts_are_exact_and_bounded() -> None:
    hotness = Hotness(capacity=10, half_life=1000, most=100)
    names = [bytes([i]) for i in range(20)]
    for i, name in enumerate(names):
        for _ in range(1 + i):
            hotness.ask([name])
    found = hotness.hottest(5.0, 8)
    assert set(found) == set(names[-8:])
    assert found == {name: hotness.count(name) for name in found}
    assert len(hotness.hottest(15.0, 100)) < 8
