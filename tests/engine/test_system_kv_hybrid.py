"""System KVs of models with several KV cache groups: what the engine can take is right, the rest
is refused with its limit.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from benchmarks.harness.architectures import ARCHITECTURES, WINDOW
from benchmarks.harness.random_model import VOCABULARY, write_model
from tests.engine.engine import APART
from tests.engine.models import skip_where_not_served
from tests.engine.system_kv import run_program, run_relay
from vllm_relay.system_kv.file import SystemKVFile

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Longer than what a file keeps under the window, and no multiple of a block.
TOKENS = np.random.default_rng(5).integers(3, VOCABULARY, size=1100).tolist()
# 1,000 tokens in common, and as many blocks.
OTHER = TOKENS[:1000] + np.random.default_rng(6).integers(3, VOCABULARY, size=95).tolist()
OPTIONS = ("--skip-tokenizer-init", "--max-model-len", "2048", "--dtype", "float32")
STEPS = 8
# Root mean square of log-probability differences in float32.
ROUNDING = 1e-3


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """An architecture, and the blocks that a file of `TOKENS` takes on an engine with it.

    Attributes:
        hit: tokens that requests find. pinned: blocks, of all groups.
        layer: one with a window. stock: True to compare with an engine without the file, and not
            with requests that may not use it.
    """

    architecture: str
    block_size: int
    hit: int
    pinned: int
    layer: str = "model.layers.0.self_attn.attn"
    stock: bool = True


KEPT = WINDOW - 1 + 2 * 256  # tokens of a layer with a window
HYBRIDS = [
    # 3 groups with a window of 2 blocks each, then one of 8 blocks.
    Hybrid(architecture="gemma-3", block_size=128, hit=1024, pinned=3 * 2 + 8),
    # Smaller blocks than the builder's: 8 blocks of 32 under the window, 34 without one.
    Hybrid(
        architecture="gpt-oss",
        block_size=32,
        hit=1088,
        pinned=8 + 34,
        layer="model.layers.0.attn.attn",
    ),
    # Blocks of 256 under the window and of 128 without: hits at multiples of 256.
    Hybrid(architecture="gemma-4", block_size=128, hit=1024, pinned=1 + 8, stock=False),
]


def _engine(model: Path, hybrid: Hybrid, *files: Path) -> dict[str, Any]:
    settings = {"min_saved_tokens": 0, "system_kv": [str(file) for file in files]}
    return {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 4096,
        "block_size": hybrid.block_size,
        "num_gpu_blocks_override": 512,
        "attention_backend": "relay" if files else "CPU_ATTN",
        "additional_config": {"relay": settings},
    }


def _ask(prefix: list[int] = TOKENS, count: int = 3, **more: Any) -> list[Any]:
    prompts = [[*prefix, 900 + i, 7 + i] for i in range(count)]
    return ["generate", {"prompts": prompts, "steps": STEPS, **more}]


def _distance(answers: dict[str, Any], reference: dict[str, Any]) -> float:
    difference = np.array(answers["logprobs"]) - np.array(reference["logprobs"])
    return float(np.sqrt(np.mean(difference**2)))


@pytest.mark.parametrize("hybrid", HYBRIDS, ids=lambda hybrid: hybrid.architecture)
def test_requests_hit_and_answer_as_without_the_file(hybrid: Hybrid, tmp_path: Path) -> None:
    skip_where_not_served(hybrid.architecture)
    architecture = ARCHITECTURES[hybrid.architecture]
    model = write_model(tmp_path / "model", architecture(), peak=architecture.peak)
    files = [tmp_path / "acme.relay", tmp_path / "other.relay"]
    for file, tokens in zip(files, (TOKENS, OTHER), strict=True):
        file.with_suffix(".json").write_text(json.dumps(tokens))
    sources = [x for file in files for x in ("--token-ids", file.with_suffix(".json"))]
    run_relay("build", "--model", model, *sources, "-o", tmp_path, *OPTIONS)
    for file, tokens in zip(files, (TOKENS, OTHER), strict=True):
        begins = {layer.first_token for layer in SystemKVFile(file).manifest.layers}
        assert begins == {0, len(tokens) - KEPT}
    cold: list[Any] = []
    if hybrid.stock:
        cold, _ = run_program(tmp_path, _engine(model, hybrid), [_ask(), _ask(OTHER)])
    # The first blocks are those of a group with a window.
    program = [
        *([] if cold else [_ask(salt="of nobody"), _ask(OTHER, salt="of nobody else")]),
        _ask(),
        _ask(OTHER),
        ["status", None],
        ["counters", None],
        _ask(TOKENS[:600], count=1),  # ends before the window that is there
        ["reset", None],
        _ask(),
        ["rpc", ["spoil_block", hybrid.layer, 1]],
        # The tokens that are right, so that only log-probabilities differ.
        _ask(force=cold[0]["tokens"] if cold else None),
    ]
    results, _ = run_program(tmp_path, _engine(model, hybrid, *files), program)
    references, results = (cold, results) if cold else (results[:2], results[2:])
    assert references[0]["cached"][0] == 0
    *answers, (status, other), (counters,), half, reset, again, _, spoilt = results
    for found, reference in zip((*answers, again), (*references, references[0]), strict=True):
        assert found["cached"] == [hybrid.hit] * 3
        assert found["tokens"] == reference["tokens"]
        assert _distance(found, reference) < ROUNDING
    assert status["block_ids"] == list(range(1, hybrid.pinned + 1))
    for entry in (status, other):
        assert (entry["tokens_pinned"], entry["tokens_hit"]) == (hybrid.hit, 3 * hybrid.hit)
    assert 0 < len({*status["block_ids"]} & {*other["block_ids"]}) < hybrid.pinned
    assert counters["steps_relayed"] > 0 and counters["fallbacks"] == 0
    assert half["cached"] == [0]
    assert reset is True
    # The comparison sees a wrong block.
    assert spoilt["cached"] == [hybrid.hit] * 3
    assert _distance(spoilt, references[0]) > 30 * ROUNDING


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mamba and attention layers in turn."""
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=4,
        mamba_d_state=32,
        mamba_chunk_size=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return write_model(tmp_path_factory.mktemp("mamba") / "model", config)


def test_a_build_of_a_model_with_states_is_refused_with_the_engines_limit(mamba: Path) -> None:
    source = mamba.parent / "prompt.json"
    source.write_text(json.dumps(TOKENS))
    output = mamba.parent / "acme.relay"
    given = ("--model", mamba, "--token-ids", source, "-o", output)
    text = run_relay("build", *given, *OPTIONS, status=1, **APART)
    assert text.splitlines()[-1] == (
        "vllm-relay: system KVs cannot be used: vLLM has no call that writes the state of Mamba, "
        "gated-delta or convolution layers into a KV block; do_kv_cache_update takes keys and "
        "values"
    )
    assert not output.exists()
