"""A build takes a KV cache of what its prompts need, whatever else runs on the machine."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine.engine import SMOLLM2
from vllm_relay.system_kv.build import Builder, padded_layers

TOKEN = 2 * 3 * 64 * 2 * 30  # bytes of SmolLM2's keys and values


def builder(folder: Path, monkeypatch: Any, **options: Any) -> Builder:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    return Builder(EngineArgs(model=str(SMOLLM2), **options), folder)


@pytest.mark.parametrize("lengths", [[1], [100, 2000], [7000] * 50])
def test_the_kv_cache_holds_the_prompts_of_a_step_and_little_more(
    lengths: list[int], tmp_path: Path, monkeypatch: Any
) -> None:
    build = builder(tmp_path, monkeypatch)
    build._take_memory(lengths)
    config = build._config
    most = max(lengths) + config.scheduler_config.max_num_batched_tokens
    held = config.cache_config.kv_cache_memory_bytes / TOKEN
    assert min(sum(lengths), most) < held <= min(sum(lengths), most) + 256 * (len(lengths) + 1) + 1
    assert config.model_config.max_model_len == max(lengths) + 1


def test_a_size_in_vllms_options_stays(tmp_path: Path, monkeypatch: Any) -> None:
    build = builder(tmp_path, monkeypatch, kv_cache_memory_bytes=2**30)
    build._take_memory([100])
    assert build._config.cache_config.kv_cache_memory_bytes == 2**30


def test_where_rope_depends_on_the_length_the_length_stays(
    tmp_path: Path, monkeypatch: Any
) -> None:
    build = builder(tmp_path, monkeypatch)
    build.identity.rope["max_model_len"] = 8192  # type: ignore[index]
    build._take_memory([100])
    config = build._config
    assert config.model_config.max_model_len == 8192
    assert config.cache_config.kv_cache_memory_bytes >= 8192 * TOKEN


def test_groups_as_large_as_the_rarest_kind_of_layers_have_empty_places() -> None:
    assert padded_layers([]) == padded_layers(["full_attention"] * 7) == 1
    assert padded_layers(["sliding_attention", "full_attention"] * 3) == 1
    # 52 and 10 layers: 7 groups of 10.
    kinds = ["sliding_attention"] * 52 + ["full_attention"] * 10
    assert padded_layers(kinds) == 70 / 62
