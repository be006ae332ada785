"""Hotness: counts that decay, in bounded memory, and the hottest prefixes that fit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.system_kv.pool_traffic import chain
from vllm_relay.system_kv.hotness import Hotness


def _hotness(capacity: int = 10, half_life: int = 1000, most: int = 1000) -> Hotness:
    return Hotness(capacity=capacity, half_life=half_life, most=most)


def test_a_count_halves_with_the_blocks_asked_for() -> None:
    hotness = _hotness(half_life=100)
    (name,) = chain(("acme", 1))
    hotness.ask([name])
    assert hotness.count(name) == pytest.approx(1)
    hotness.ask(chain(("other", 100)))
    assert hotness.count(name) == pytest.approx(0.5)
    hotness.ask([name])
    assert hotness.count(name) == pytest.approx(1.5, rel=0.01)
    assert hotness.count(b"never asked for") == 0


@given(
    st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), max_size=40),
    st.integers(1, 200),
)
def test_counts_are_those_of_the_definition(prompts: list[list[int]], half_life: int) -> None:
    hotness = _hotness(half_life=half_life, most=100)
    times: dict[int, list[int]] = {}
    asked = 0
    for prompt in prompts:
        hotness.ask([bytes([x]) for x in prompt])
        for x in reversed(prompt):
            asked += 1
            times.setdefault(x, []).append(asked)
    for x in range(13):
        expected = sum(2 ** ((t - asked) / half_life) for t in times.get(x, []))
        assert math.isclose(hotness.count(bytes([x])), expected, rel_tol=1e-6, abs_tol=1e-12)


@given(st.lists(st.lists(st.integers(0, 40), max_size=8, unique=True), max_size=80))
def test_memory_is_bounded_and_the_hottest_are_remembered(prompts: list[list[int]]) -> None:
    bounded, unbounded = _hotness(most=10), _hotness(most=1000)
    for i, prompt in enumerate(prompts):
        for hotness in (bounded, unbounded):
            hotness.ask([b"hot", *[bytes([x]) for x in prompt]])
        assert len(bounded) <= 10
        assert bounded.count(b"hot") == unbounded.count(b"hot") >= min(i + 1, 1.5) / 2


def test_what_prompts_have_in_common_is_hot_and_their_ends_are_not() -> None:
    hotness = _hotness(capacity=20, most=64)
    for i in range(30):
        hotness.ask(chain(("acme", 8), (f"own {i}", 4)))
    assert all(map(hotness.is_hot, chain(("acme", 8))))
    assert not any(map(hotness.is_hot, chain(("acme", 8), ("own 29", 4))[8:]))


def test_no_more_is_hot_than_fits_and_of_one_prompt_the_beginning() -> None:
    hotness = _hotness(capacity=50, half_life=800, most=400)
    prompt = chain(("acme", 100))
    for _ in range(10):
        hotness.ask(prompt)
    hot = [hotness.is_hot(name) for name in prompt]
    assert 25 <= sum(hot) <= 50
    assert hot == sorted(hot, reverse=True)


def test_nothing_is_hot_that_came_once_or_that_has_cooled_or_without_room() -> None:
    hotness, none = _hotness(half_life=100, most=100), _hotness(capacity=0)
    name, other = chain(("acme", 1)), chain(("other", 1))
    for _ in range(5):
        hotness.ask(name)
        none.ask(name)
    hotness.ask(other)
    assert hotness.is_hot(name[0]) and not hotness.is_hot(other[0]) and not none.is_hot(name[0])
    for i in range(300):
        hotness.ask(chain((f"own {i}", 1)))
    assert not hotness.is_hot(name[0])
