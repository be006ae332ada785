"""Splits of system attention, by FlashAttention 3's arithmetic in plain Python."""

import heapq
from itertools import product

import pytest

from vllm_relay.ops.planning.splits import PROCESSORS, TILE_ROWS, system_splits

KEYS = 176  # of a tile; heads of 128, neither causal nor local
# Partials in float32 against keys and values in bf16; a tile's time is that of its reads.
HEAD_SIZE = 128


def dynamic_splits(groups: list[tuple[int, int]], kv_heads: int, most: int) -> list[int]:
    """Parts of each sequence, of (packed query rows, keys): FA3's ``prepare_varlen_num_blocks``."""
    tiles = [(-(-rows // TILE_ROWS), -(-keys // KEYS)) for rows, keys in groups]
    blocks = sum(rows * keys for rows, keys in tiles)
    each = max(1, -(-int(11 * blocks * kv_heads) // (10 * PROCESSORS)))  # blocks x 1.1
    return [max(min(-(-keys // each), most), 1) for _, keys in tiles]


def seconds(groups: list[tuple[int, int]], kv_heads: int, most: int) -> float:
    """Time of a call in tiles of keys: the last processor's tiles, and reading the partials."""
    work = []
    for (rows, keys), splits in zip(groups, dynamic_splits(groups, kv_heads, most), strict=True):
        tiles = -(-keys // KEYS)
        row_tiles = -(-rows // TILE_ROWS)
        sizes = [min(-(-tiles // splits), tiles - i * -(-tiles // splits)) for i in range(splits)]
        work += [size for size in sizes if size > 0] * row_tiles * kv_heads
    busy = [0.0] * PROCESSORS
    for size in work:
        heapq.heappush(busy, heapq.heappop(busy) + size)
    # Written once and read once, by all processors; a tile of keys is two of bf16.
    rows = sum(rows for rows, _ in groups) * kv_heads
    splits = max(dynamic_splits(groups, kv_heads, most))
    partials = 0 if splits == 1 else 2 * 4 * rows * splits * HEAD_SIZE
    return max(busy) + partials / (2 * 2 * KEYS * HEAD_SIZE * PROCESSORS)


CASES = list(product((1, 2, 4, 8), (4, 8), (8, 32, 64, 128, 256), (1024, 8192, 32768)))


@pytest.mark.parametrize(("kv_heads", "group", "rows", "keys"), CASES)
def test_the_bound_is_near_the_best(kv_heads: int, group: int, rows: int, keys: int) -> None:
    """One group, and four; 8 KV heads on 1 to 8 ranks."""
    most = system_splits(rows, kv_heads * group, kv_heads)
    for groups in ([(rows * group, keys)], [(rows * group // 4, keys)] * 4):
        best = min(seconds(groups, kv_heads, n) for n in range(1, 33))
        assert seconds(groups, kv_heads, most) <= 1.15 * best


def test_the_bound_itself() -> None:
    # One tile for 8 rows of one rank of eight: as many parts as vLLM allows.
    assert system_splits(8, 8, 1) == 32
    assert system_splits(8, 8, 1, most=16) == 16
    # 64 tiles: three parts each give 192, more than 132.
    assert system_splits(256, 32, 8) == 3
    assert system_splits(4096, 32, 8) == 1
    assert system_splits(0, 32, 8) == 32
    assert system_splits(8, 8, 1, most=0) == 0
