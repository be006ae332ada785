"""Engines whose metadata is not the scheduler's own: refused, and every write is still seen."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.utils import make_kv_sharing_fast_prefill_common_attn_metadata

from tests.unit.backend.cpu_bench import make_bench, make_step, outputs
from vllm_relay.backend import engine_support
from vllm_relay.config import CAPTURE_CONNECTOR


def config(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
        "kv_sharing_fast_prefill": False,
        "is_mm_prefix_lm": False,
        "kv_connector": "OffloadingConnector",
        **changes,
    }
    part = SimpleNamespace(**values)
    parts = ("parallel_config", "cache_config", "model_config", "kv_transfer_config")
    return SimpleNamespace(**dict.fromkeys(parts, part))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"use_ubatching": True}, "two batches in flight (dual-batch overlap)"),
        ({"kv_sharing_fast_prefill": True}, "fast prefill of shared KV layers"),
        ({"is_mm_prefix_lm": True}, "attention both ways over images"),
        ({"kv_connector": CAPTURE_CONNECTOR}, "vLLM's own attention computes system KVs"),
    ],
)
def test_engines_are_refused_with_the_reason(change: dict[str, Any], reason: str | None) -> None:
    assert engine_support.engine_refusal(config(**change), SimpleNamespace()) == reason


def test_chunks_and_batch_invariance_are_refused(monkeypatch: Any) -> None:
    chunked = SimpleNamespace(attention_chunk_size=64)
    assert engine_support.engine_refusal(config(), chunked) == "chunked local attention"
    monkeypatch.setattr(engine_support.envs, "VLLM_BATCH_INVARIANT", True)
    assert engine_support.engine_refusal(config(), SimpleNamespace()) == (
        "batch invariance is asked for"
    )


def test_writes_that_a_wrapper_of_vllm_cuts_off_are_seen() -> None:
    bench = make_bench(8, 2, 64, torch.bfloat16, "vec", 21)
    packed = bench.plan_by()
    query = torch.randn(3, 8, 64).bfloat16()
    outputs(bench, make_step([[1, 2, 3, 10], [1, 2, 3, 15], [1, 2, 3, 17]], [97, 120, 128]), query)
    (segment,) = packed
    assert segment.block_ids.tolist() == [1, 2, 3]
    # The second request writes blocks 2 and 3, and the third finds them in the same step.
    step = make_step([[8, 9], [1, 2, 3], [1, 2, 3, 10]], [64, 96, 97], [64, 64, 1])
    step.logits_indices_padded = torch.tensor([63, 127, 128])
    step.num_logits_indices, step.max_logits_per_req = 3, 1
    wrapped = make_kv_sharing_fast_prefill_common_attn_metadata(step)
    assert wrapped.num_actual_tokens == 3 and wrapped.max_query_len == 1
    bench.builder.build(0, wrapped)
    assert segment.block_ids.tolist() == [1]
