"""KV cache groups of an engine: as system KVs see them, and those that they cannot have."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_relay.system_kv.cache_groups import STATE, cache_groups, longest_blocks, refusal
from vllm_relay.system_kv.file import SystemKVError
from vllm_relay.system_kv.placement import CacheGroup

HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8}
HEADS["dtype"] = torch.float32


def config(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=s, layer_names=[f"l{i}"]) for i, s in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


def full(**more: Any) -> Any:
    return FullAttentionSpec(**HEADS, **more)


def windowed(**more: Any) -> Any:
    return SlidingWindowSpec(**{**HEADS, **more}, sliding_window=100)


def test_windows_and_block_sizes_are_each_groups_own() -> None:
    assert cache_groups(config(windowed(block_size=32), full())) == [
        CacheGroup(block_size=32, window=100, layers=("l0",)),
        CacheGroup(block_size=16, window=None, layers=("l1",)),
    ]


def test_layers_whose_heads_differ_are_one_group() -> None:
    specs = {"a": full(), "b": FullAttentionSpec(**{**HEADS, "head_size": 16})}
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    assert cache_groups(config(uniform)) == cache_groups(config(full()))


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([], "the model has no KV cache"),
        ([full(), MambaSpec(block_size=16, shapes=((2, 8),), dtypes=(torch.float32,))], STATE),
        ([full(sliding_window=100)], r"vLLM keeps whole .* manager is off \(--disable-hybrid"),
        ([full(attention_chunk_size=64)], "vLLM keeps whole the KV of layers with a window or ch"),
        ([MLAAttentionSpec(**HEADS)], "layers of vLLM's kind MLAAttentionSpec are not stored"),
        (
            [full(), ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)],
            "layers of vLLM's kind ChunkedLocalAttentionSpec are not stored",
        ),
    ],
    ids=["none", "mamba", "unified", "unified-chunks", "latent", "chunks"],
)
def test_kinds_that_cannot_be_stored_are_refused_with_the_reason(
    specs: list[Any], said: str
) -> None:
    assert refusal(config(full(), windowed())) is None
    with pytest.raises(SystemKVError, match=f"^system KVs cannot be used: {said}"):
        cache_groups(config(*specs))


def test_the_longest_request_takes_blocks_of_every_group() -> None:
    engine = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000),
        max_in_flight_tokens=200,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
    )
    assert longest_blocks(engine, config(full())) == 63
    # 99 tokens before those in flight, begun anywhere in a block.
    assert longest_blocks(engine, config(full(), windowed())) == 63 + 20
