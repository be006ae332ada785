"""The engine's KV cache groups as system KVs need them, and why some engines' cannot be used.

vLLM's prefix caching finds, under full attention, every block of a prefix, and under a sliding
window the blocks that its next token sees. Both are keys and values, which ``do_kv_cache_update``
writes. A Mamba or gated-delta layer needs its state at the end of the prefix. Connectors that move
such states copy raw memory between equal engines: the layout is the kernel's, and its cut by
tensor-parallel rank the model's. And vLLM 0.26 takes, with any KV connector, the hit of full
attention alone for such a model, and expects the connector to bring the state.
"""

import math
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_relay.system_kv.file import SystemKVError
from vllm_relay.system_kv.placement import CacheGroup

STATE = (
    "vLLM has no call that writes the state of Mamba, gated-delta or convolution layers into a KV "
    "block; "
    "do_kv_cache_update takes keys and values"
)
_WHOLE = (
    "vLLM keeps whole the KV of layers with a window or chunks, since its hybrid KV cache manager "
    "is off (--disable-hybrid-kv-cache-manager, or another KV connector)"
)


def cache_groups(kv_cache_config: Any) -> list[CacheGroup]:
    """The groups, in vLLM's order. Raises SystemKVError for kinds that cannot be stored."""
    if (reason := refusal(kv_cache_config)) is not None:
        raise SystemKVError(f"system KVs cannot be used: {reason}")
    return [
        CacheGroup(
            block_size=group.kv_cache_spec.block_size,
            window=getattr(_specs(group)[0], "sliding_window", None),
            layers=tuple(group.layer_names),
        )
        for group in kv_cache_config.kv_cache_groups
    ]


def refusal(kv_cache_config: Any) -> str | None:
    """Why the KV of these groups cannot be stored, or None."""
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    for spec in (spec for group in kv_cache_config.kv_cache_groups for spec in _specs(group)):
        if type(spec) is FullAttentionSpec:
            if spec.sliding_window or spec.attention_chunk_size:
                return _WHOLE
        elif type(spec) is not SlidingWindowSpec:
            name = type(spec).__name__
            return STATE if name == "MambaSpec" else f"layers of vLLM's kind {name} are not stored"
    return None


def only_group(kv_cache_config: Any) -> tuple[CacheGroup, int]:
    """The group of an engine with one, of full attention, and the bytes of its blocks of one id.

    Raises SystemKVError where there is another.
    """
    groups = cache_groups(kv_cache_config)
    if len(groups) > 1 or groups[0].window is not None:
        raise SystemKVError("the model has layers with a window or of several kinds")
    specs = _specs(kv_cache_config.kv_cache_groups[0])
    layers = len(groups[0].layers) if len(specs) == 1 else 1
    return groups[0], layers * sum(spec.page_size_bytes for spec in specs)


def longest_blocks(vllm_config: Any, kv_cache_config: Any) -> int:
    """The blocks that vLLM sets aside for one request of ``max_model_len``, all groups."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return sum(
        math.ceil(spec.max_memory_usage_bytes(vllm_config) / spec.page_size_bytes) for spec in specs
    )


def _specs(group: Any) -> Sequence[Any]:
    """The specs of a group's layers: one each where their heads differ, else one for all."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [group.kv_cache_spec] if each is None else list(each.values())
