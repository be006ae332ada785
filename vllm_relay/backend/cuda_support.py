"""Engines and layers that the CUDA backend leaves to vLLM's own FlashAttention, with reasons."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backend import AttentionType

from vllm_relay import compat
from vllm_relay.backend import engine_support


def engine_refusal(builder: Any, vllm_config: VllmConfig) -> str | None:
    """Why no step of an engine is relayed, or None.

    Args:
        builder: vLLM's FlashAttentionMetadataBuilder of the layers.
    """
    speculative = vllm_config.speculative_config
    checks = (
        (
            # Inside a captured graph a draft model's lengths move on after the plan was made.
            speculative is not None and speculative.method not in compat.DRAFTS_WITHOUT_MODEL,
            "speculative decoding with a draft model",
        ),
        (getattr(builder.kv_cache_spec, "sliding_window", None) is not None, "a sliding window"),
        (builder.rswa_window is not None, "reference sliding window attention"),
    )
    own = next((reason for applies, reason in checks if applies), None)
    return engine_support.engine_refusal(vllm_config, builder.kv_cache_spec) or own


def layer_refusal(impl: Any) -> str | None:
    """Why a layer, vLLM's FlashAttentionImpl, is not relayed, or None."""
    checks = (
        (impl.attn_type != AttentionType.DECODER, f"{impl.attn_type} attention"),
        (tuple(impl.sliding_window or (-1, -1)) != (-1, -1), "a sliding window"),
        (impl.alibi_slopes is not None, "ALiBi"),
        (impl.sinks is not None, "attention sinks"),
        (
            impl.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
            f"a {impl.kv_cache_dtype} KV cache",
        ),
        # Its tables and lengths have to be of whole pages (vLLM 0.33, Blackwell).
        (compat.uses_fa4_hd256(impl), "FlashAttention 4 with heads of 256"),
    )
    return next((reason for applies, reason in checks if applies), None)


def agree(impls: Sequence[Any], vllm_config: VllmConfig) -> None:
    """Refuse each layer that another rank of the tensor-parallel group refuses.

    Ranks capture the same CUDA graphs, with collectives in them: one may not relay alone.
    """
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return
    refused = torch.tensor([impl.refusal is not None for impl in impls], dtype=torch.int32)
    distributed.all_reduce(refused, distributed.ReduceOp.MAX, group=get_tp_group().cpu_group)
    for impl, somewhere in zip(impls, refused.tolist(), strict=True):
        if somewhere and impl.refusal is None:
            impl.refusal = "kernels that fail their self-test on another rank"


def has_consecutive_blocks(kv_cache: Any) -> bool:
    """True if the tokens of block b + 1 follow those of block b in memory.

    Args:
        kv_cache: ``[num_blocks, Hkv, block_size, 2 * D]``; None or empty before the cache is made.
    """
    if getattr(kv_cache, "ndim", 0) != 4:
        return False
    return bool(kv_cache.stride(0) == kv_cache.shape[2] * kv_cache.stride(2))
