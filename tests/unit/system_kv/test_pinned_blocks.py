"""Pinned blocks: registered in vLLM's block pool, and what counts as a request's hit."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash

from vllm_relay import compat
from vllm_relay.config import SystemKVConfig
from vllm_relay.system_kv.pinned_blocks import PinnedBlocks, hit_length
from vllm_relay.system_kv.placement import CacheGroup, pinned_ids, place


def test_a_prompt_behind_the_longer_one_that_it_begins_shares_its_blocks() -> None:
    """Under a window its blocks end in ones that the longer prompt's begin with."""
    groups = [
        CacheGroup(block_size=4, window=None, layers=("a",)),
        CacheGroup(block_size=4, window=9, layers=("b",)),
    ]
    prompts = [list(range(33)), list(range(29))]
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=16),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        num_hash_lookahead_tokens=0,
    )
    init_none_hash(compat.target("vllm.utils.hashing:get_hash_fn_by_name")("sha256"))
    files: Any = [
        SimpleNamespace(
            path="x", seal=f"{i}", manifest=SimpleNamespace(name=f"{i}", token_ids=p, tokens=len(p))
        )
        for i, p in enumerate(prompts)
    ]
    salts = [None] * len(prompts)
    placed = place(prompts, groups, salts)
    tails = [{*windowed.block_ids} - {0} for _, windowed in placed]
    assert tails[0] & tails[1] and tails[1] - tails[0]
    pool = BlockPool(64, True, hash_block_size=4)
    pins = PinnedBlocks(config, files, salts, placed, groups, 8, SystemKVConfig())
    pins.take(pool)
    for reset in range(2):
        pins.rewritten(reset, None)
        assert pins.released is None
        assert all(pool.blocks[i].block_hash is not None for i in pinned_ids(placed))
        assert pool.reset_prefix_cache()


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
    assert hit_length(pinned, held) == hit
