"""Engines and layers that the CUDA backend leaves to vLLM's own FlashAttention, with reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import distributed
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backend import AttentionType

from vllm_relay import compat, metrics
from vllm_relay.backend import engine_support
from vllm_relay.config import RelayConfig
from vllm_relay.sharing.cost import min_saved_tokens
from vllm_relay.sharing.cost_store import SHIPPED, find_costs
from vllm_relay.sharing.gpu import GPUS, HOST_CALL, find_gpu, gpu_costs

# For a GPU that is not in `GPUS`.
STAND_IN = "A100"


def refusal(builder: Any, vllm_config: VllmConfig, config: RelayConfig) -> str | None:
    """Why no step of a builder's layers is relayed, or None."""
    if not config.enabled:
        return "switched off by additional_config"
    reason = engine_refusal(builder, vllm_config)
    return reason or default_refusal(builder, vllm_config, config)


def engine_refusal(builder: Any, vllm_config: VllmConfig) -> str | None:
    """Why no step of an engine is relayed, or None.

    Args:
        builder: a RelayMetadataBuilder.
    """
    speculative = vllm_config.speculative_config
    group_window = getattr(builder.kv_cache_spec, "sliding_window", None) or 0
    windows = {window_of(layer.impl) for layer in builder.layers}
    checks = (
        (draft_layers(vllm_config) is None, "a draft model whose layers vLLM does not name"),
        (
            # The host does not know how many drafts of a request are verified.
            getattr(speculative, "enable_adaptive_verification", False),
            "adaptive verification of drafts",
        ),
        # vLLM 0.26 gives all layers the window of their group.
        (windows - {group_window}, f"a window of {group_window or 'all'} over layers of another"),
        (builder.rswa_window is not None, "reference sliding window attention"),
    )
    own = next((reason for applies, reason in checks if applies), None)
    return engine_support.engine_refusal(vllm_config, builder.kv_cache_spec) or own


def draft_layers(vllm_config: VllmConfig) -> set[str] | None:
    """Names of the draft model's layers, which is loaded by now; None if they cannot be told.

    In a captured graph their lengths move on after the plan was made.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in engine_support.DRAFTS_WITHOUT_MODEL:
        return set()
    try:
        runner = compat.worker().model_runner
    except RuntimeError:
        return None
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    if drafter is None:  # a pipeline's stages before the last
        return set()
    names = getattr(drafter, "draft_attn_layer_names", None)
    if names is None:  # runner V1
        names = getattr(drafter, "_draft_attn_layer_names", None)
    return names if names is None else set(names)


def target_layers(layers: Mapping[str, Any], vllm_config: VllmConfig) -> list[Any]:
    """The layers that are not a draft model's; those are left to vLLM.

    They are in the groups of the target model's layers, and run on its metadata first.
    """
    drafts = draft_layers(vllm_config) or set()
    for name in drafts & layers.keys():
        layers[name].impl.refusal = "a draft model"
    return [layer for name, layer in layers.items() if name not in drafts]


def default_refusal(builder: Any, vllm_config: VllmConfig, config: RelayConfig) -> str | None:
    """Why no step is relayed unless the settings ask for it, or None: relay might cost more there.

    Args:
        builder: a RelayMetadataBuilder.
    """
    if config.min_saved_tokens is not None:
        return None
    if builder.fa_versions == {2}:
        # It neither splits the keys of many queries nor packs grouped heads.
        return "FlashAttention 2, unless min_saved_tokens is set"
    parallel = vllm_config.parallel_config.data_parallel_size > 1
    one_set = builder.use_full_cuda_graph and (parallel or not vllm_config.use_v2_model_runner)
    if one_set and not config.system_kv.files:
        # Each layer of a step that shares nothing would pay for kernels that return at once.
        where = "data parallelism" if parallel else "runner V1"
        return f"one set of CUDA graphs ({where}), unless min_saved_tokens or a system KV is set"
    return None


def predicted_minimum(builder: Any, graphs: bool) -> int:
    """KV token reads per layer that a group has to save, by the costs of the GPU.

    Those that `vllm-relay calibrate` measured on it, else an estimate.

    Args:
        builder: a RelayMetadataBuilder. graphs: for steps in full CUDA graphs.
    """
    spec, gpu, name = builder.kv_cache_spec, GPUS[STAND_IN], STAND_IN
    shape = (builder.num_heads_q, builder.num_heads_kv, spec.head_size)
    if builder.device.type == "cuda":
        device = torch.cuda.get_device_properties(builder.device)
        name = device.name
        if clock := getattr(device, "memory_clock_rate", 0):
            # kHz and bits; memory transfers twice per clock.
            memory = 250.0 * clock * device.memory_bus_width
            gpu = replace(gpu, memory=memory, l2=getattr(device, "L2_cache_size", gpu.l2))
    dtype = "float8_e4m3fn" if spec.dtype.itemsize == 1 else str(spec.dtype)[len("torch.") :]
    try:
        found = find_costs(*shape, device=name, dtype=dtype)
        min_saved_tokens(found.costs)
    except ValueError as error:  # of the user's file
        metrics.say_once(str(error))
        found = find_costs(*shape, device=name, dtype=dtype, files=[SHIPPED])
    costs = found.costs
    if found.guessed and find_gpu(name) is None:  # those of a CPU
        costs = gpu_costs(gpu, *shape, spec.dtype.itemsize)
    if not graphs:
        slower = max(costs.system.call, HOST_CALL)
        costs = replace(costs, system=replace(costs.system, call=slower))
    return min_saved_tokens(costs)


def minimums(builder: Any, config: RelayConfig) -> tuple[int, int]:
    """KV token reads per layer that a group has to save: as decode steps run, and in no graph."""
    if config.min_saved_tokens is not None:
        return config.min_saved_tokens, config.min_saved_tokens
    found = torch.tensor([predicted_minimum(builder, builder.use_full_cuda_graph),
                          predicted_minimum(builder, False)])  # fmt: skip
    # Ranks on another machine may have other measurements, and have to plan alike.
    if builder.vllm_config.parallel_config.tensor_parallel_size > 1:
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=get_tp_group().cpu_group)
    inside, outside = found.tolist()
    return inside, outside


def least_window(layers: Sequence[Any]) -> int:
    """Tokens of a row of which each relayed layer sees all; 0: of any row."""
    windows = {window_of(layer.impl) for layer in layers if layer.impl.refusal is None}
    return min(windows - {0}, default=0)


def window_of(impl: Any) -> int:
    """Tokens that a query of a layer sees, with its own; 0: all."""
    return int(impl.sliding_window[0]) + 1


def has_fp8(impl: Any) -> bool:
    """True if queries, keys and values of a layer are float8_e4m3fn, as FlashAttention 3 takes."""
    return (
        impl.kv_cache_dtype in ("fp8", "fp8_e4m3")
        and impl.vllm_flash_attn_version == 3
        and bool(impl.supports_quant_query_input)
    )


def layer_refusal(impl: Any) -> str | None:
    """Why a layer, vLLM's FlashAttentionImpl, is not relayed, or None."""
    kind = AttentionType(impl.attn_type)
    checks = (
        (kind != AttentionType.DECODER, f"{kind.value} attention"),
        (tuple(impl.sliding_window)[1] > 0, "a window on both sides"),
        (impl.alibi_slopes is not None, "ALiBi"),
        (
            not (has_fp8(impl) or impl.kv_cache_dtype in ("auto", "float16", "bfloat16")),
            f"a {impl.kv_cache_dtype} KV cache",
        ),
        # Its tables and lengths have to be of whole pages (vLLM 0.33, Blackwell).
        (compat.switch(impl, "fa4_hd256"), "FlashAttention 4 with heads of 256"),
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
