"""The order of prompts for offline batches."""

import random
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import pytest

import vllm_relay


def shared(prompts: list[Any]) -> int:
    """Elements that each has in common with the one before it."""
    pairs = (zip(a, b, strict=False) for a, b in pairwise(prompts))
    return sum(len(list(takewhile(lambda both: both[0] == both[1], pair))) for pair in pairs)


def test_prompts_of_one_prefix_follow_one_another() -> None:
    """No order shares more with the one before: the sum is the size of the trie's inner edges."""
    rng = random.Random(0)
    for _ in range(50):
        prompts = [[rng.randrange(2) for _ in range(rng.randrange(6))] for _ in range(6)]
        at = vllm_relay.order(prompts)
        assert sorted(at) == list(range(6))
        got = shared([prompts[i] for i in at])
        assert all(shared(rng.sample(prompts, 6)) <= got for _ in range(100))


def test_equal_prompts_keep_their_order() -> None:
    assert vllm_relay.order(["b", "a", "b", "a"]) == [1, 3, 0, 2]
    assert vllm_relay.order([]) == []
    assert vllm_relay.order([{"prompt_token_ids": [1]}, {"prompt_token_ids": []}]) == [1, 0]


def test_prompts_are_those_that_vllm_takes() -> None:
    tokens = [{"prompt_token_ids": [2, 1]}, [1, 2], np.array([1, 1]), (2,)]
    assert vllm_relay.order(tokens) == [2, 1, 3, 0]
    texts = [
        {"prompt": "b"},
        "a",
        [{"role": "system", "content": "ü"}, {"role": "user", "content": "2"}],
        [{"role": "system", "content": "ü"}, {"role": "user", "content": "1"}],
    ]
    assert vllm_relay.order(texts) == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", [1]], "prompts: 0 and 1 are text and tokens, which have no common order"),
        ([[1], 5], "prompts: 1 is neither text, tokens nor messages: int"),
        ([["a"]], "prompts: 0 is neither text, tokens nor messages: list"),
        ([{"image": 1}], "prompts: 0 is neither text, tokens nor messages: NoneType"),
    ],
)
def test_other_prompts_are_named(prompts: list[Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        vllm_relay.order(prompts)
