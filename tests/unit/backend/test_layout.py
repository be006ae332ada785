"""The layout found by writing numbered tokens reads every layout that the engine's own kernel
writes.
"""

import pytest
import torch
from vllm import _custom_ops as ops

from benchmarks.harness.kv_rows import copy_rows
from vllm_relay.backend.kv_layout import BlockLayout, find_layout

HEADS, BLOCKS = 3, 5


def _writer(isa: str):
    def write(key, value, cache, slots):
        blocks, heads, size, _ = cache.shape
        keys, values = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)

    return write


def _isas(dtype: torch.dtype) -> list[str]:
    amx = ["amx"] if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else []
    return [*amx, "vec", "vec16"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 128), (96, 32), (128, 128), (256, 64)])
def test_copies_are_the_tokens_that_were_written(
    dtype: torch.dtype, head_size: int, block_size: int
) -> None:
    for isa in _isas(dtype):
        write = _writer(isa)
        layout = find_layout(write, HEADS, block_size, head_size, dtype)
        assert isinstance(layout, BlockLayout)
        tokens = BLOCKS * block_size
        key, value = torch.randn(2, tokens, HEADS, head_size).to(dtype)
        cache = torch.zeros(BLOCKS, HEADS, block_size, 2 * head_size, dtype=dtype)
        write(key, value, cache, torch.arange(tokens))
        keys, values = (
            torch.full((HEADS, 2 * block_size, head_size), torch.nan).to(dtype) for _ in "kv"
        )
        copy_rows(layout, cache, [3, 1], keys, values)
        wanted = torch.cat([torch.arange(block_size) + b * block_size for b in (3, 1)])
        assert torch.equal(keys, key[wanted].transpose(0, 1))
        assert torch.equal(values, value[wanted].transpose(0, 1))
        for found, written in zip(layout.rows(cache[3]), (key, value), strict=True):
            assert torch.equal(found, written[wanted[:block_size]])


def test_a_cache_that_is_no_rearrangement_is_refused() -> None:
    def lossy(key, value, cache, slots):
        cache.copy_(torch.cat([key, value], -1).transpose(0, 1)[None] / 3)

    assert find_layout(lossy, HEADS, 32, 64, torch.float32) is None


def test_a_rearrangement_without_strides_is_refused() -> None:
    order = torch.randperm(2 * 32 * 64, generator=torch.Generator().manual_seed(0))

    def shuffled(key, value, cache, slots):
        both = torch.cat([key.transpose(0, 1).flatten(1), value.transpose(0, 1).flatten(1)], 1)
        cache.copy_(both[:, order].view_as(cache))

    assert find_layout(shuffled, HEADS, 32, 64, torch.float32) is None
