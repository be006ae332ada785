"""Engines that neither backend relays, with reasons.

Both backends trust that the metadata of a step is the scheduler's own: every block that the step
writes is in its slot mapping, and lengths and queries say which blocks were computed before.
"""

from typing import Any

from vllm import envs

from vllm_relay.config import CAPTURE_CONNECTOR

# vLLM's speculation methods without a draft model, whose drafts have no KV of their own.
DRAFTS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")


def engine_refusal(vllm_config: Any, kv_cache_spec: Any) -> str | None:
    """Why no step of the layers of a KV cache group is relayed, or None."""
    parallel = vllm_config.parallel_config
    connector = getattr(vllm_config.kv_transfer_config, "kv_connector", None)
    checks = (
        (connector == CAPTURE_CONNECTOR, "vLLM's own attention computes system KVs"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism"),
        (parallel.use_ubatching, "two batches in flight (dual-batch overlap)"),
        # It gives layers metadata of its own, with one query per request.
        (vllm_config.cache_config.kv_sharing_fast_prefill, "fast prefill of shared KV layers"),
        (vllm_config.model_config.is_mm_prefix_lm, "attention both ways over images"),
        # Sharing changes how the sums of a request are split.
        (envs.VLLM_BATCH_INVARIANT, "batch invariance is asked for"),
        # Its metadata are of virtual batches, a chunk each.
        (
            getattr(kv_cache_spec, "attention_chunk_size", None) is not None,
            "chunked local attention",
        ),
    )
    return next((reason for applies, reason in checks if applies), None)
