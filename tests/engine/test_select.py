"""Every way to ask for relay, and what a user sees when it cannot be had."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI

from benchmarks.harness.environment import OFFLINE
from benchmarks.harness.random_model import write_random_model
from tests.engine.engine import APART, SMOLLM2, environment, run_engine
from vllm_relay.serving.processes import beside_python, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL = ["--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "16"]
# Without it vLLM kills its workers when a server stops, before they can report.
IN_ORDER = ["--shutdown-timeout", "60"]
SETTINGS = {"relay": {"min_saved_tokens": 0}}
PREFIX = "You are a careful assistant. Answer in one short sentence. " * 25


def _ask_together(url: str, questions: list[str]) -> list[str]:
    """One completion per question, all in one batch, behind one shared prefix."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    client.completions.create(model=model, prompt=PREFIX, max_tokens=1)
    done = client.completions.create(
        model=model, prompt=[PREFIX + q for q in questions], max_tokens=24, temperature=0
    )
    return [choice.text for choice in done.choices]


# Root mean square of log-probability differences: rounding makes 0.03 here, foreign KV more than 1.
# The sharp bound is that of test_parity.py.
COARSE = 0.15


def _distance(result: dict[str, Any], reference: dict[str, Any]) -> float:
    assert result["tokens"] == reference["tokens"]
    difference = np.array(result["logprobs"]) - np.array(reference["logprobs"])
    return float(np.sqrt(np.mean(difference**2)))


QUESTIONS = [f"What is {n} plus {n}? " for n in range(2, 8)]


def test_the_config_file_in_any_case(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(f"attention-backend: ReLaY\nadditional-config: '{json.dumps(SETTINGS)}'\n")
    log = tmp_path / "server.log"
    flags = ["--config", str(config), *SMALL, *IN_ORDER]
    with serving(SMOLLM2, flags, log, env={"VLLM_CPU_KVCACHE_SPACE": "1"}) as server:
        answers = _ask_together(server.url, QUESTIONS)
    assert all(answers)
    text = log.read_text()
    # said of the first step that relays: on a busy machine not all six have arrived by then
    assert re.search(r" [2-6] requests share \d+ tokens in 1 group: ", text)
    assert "relay: steps=" in text and "steps_relayed=0" not in text


def _engine(model: Path, **engine: Any) -> dict[str, Any]:
    prefix = list(range(3, 603))
    return {
        "engine": {
            "model": str(model),
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "num_gpu_blocks_override": 128,
            "additional_config": SETTINGS,
            **engine,
        },
        "warm_up": [prefix],
        "prompts": [[*prefix, 700 + i, 5] for i in range(6)],
        "force": None,
        "passes": [(None, 12)],
    }


def test_speculated_tokens_are_relayed_and_answers_stay_the_same(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", 4, 2, 64)
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    ngram |= {"prompt_lookup_min": 1, "prompt_lookup_max": 1}
    # fp32: greedy answers of two paths then part at no near-tie
    spec = _engine(model, speculative_config=ngram, dtype="float32")
    prefix = spec["warm_up"][0] * 2  # repeats itself: every request finds something to speculate
    spec["prompts"] = [[*prefix, 700 + i, *prefix[:20]] for i in range(6)]
    spec["passes"] = [(None, 40)]
    stock = run_engine(tmp_path, spec)["passes"][0]
    relay = {**spec, "engine": spec["engine"] | {"attention_backend": "relay"}}
    # twice, the second time with an error that the comparison has to see
    result = run_engine(tmp_path, {**relay, "passes": [(None, 40), ("context-lse", 40)]})
    good, planted = result["passes"]
    assert good["tokens"] == stock["tokens"]
    assert _distance(good, stock) < 1e-4
    assert planted["tokens"] != stock["tokens"] or _distance(planted, stock) > 1e-3
    queries = {int(count): rows for count, rows in result["queries"].items()}
    assert queries.get(4, 0) > 20, f"hardly a row had tokens to verify: {queries}"
    assert set(queries) >= {1, 4}


def test_an_attention_config_and_an_engine_in_its_own_process(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", 4, 2, 64)
    scrub = {"relay": {"min_saved_tokens": 0, "scrub": True}}
    spec = _engine(model, attention_config={"backend": "relay"}, additional_config=scrub)
    result = run_engine(tmp_path, spec, **APART)
    assert result["counters"]["steps_relayed"] >= 8 and result["counters"]["fallbacks"] == 0
    assert result["counters"]["tokens_shared"] == 512 * result["counters"]["steps_relayed"]


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 KV cache needs AVX-512"
)
def test_a_model_with_no_supported_layer_starts_delegates_and_says_so_once(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", 4, 2, 64)
    spec = _engine(model, attention_backend="relay", kv_cache_dtype="fp8")
    result = run_engine(tmp_path, spec)
    assert result["counters"]["steps"] == 0
    assert len(result["passes"][0]["tokens"]) == 6
    assert result["log"].count("relay: not used: no layer is supported") == 1
    assert "(a fp8 KV cache)" in result["log"]


def test_layers_with_a_sliding_window_share_what_they_see(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", 4, 2, 64)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": 256}))
    stock = run_engine(tmp_path, _engine(model))["passes"][0]
    spec = {**_engine(model, attention_backend="relay"), "force": stock["tokens"]}
    result = run_engine(tmp_path, spec)
    assert result["counters"]["steps_relayed"] >= 8 and result["counters"]["fallbacks"] == 0
    assert _distance(result["passes"][0], stock) < COARSE


def _refusal(*flags: str) -> str:
    done = subprocess.run(
        beside_python("vllm", "serve", str(SMOLLM2), *flags, *SMALL),
        env=environment(**OFFLINE),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_an_unknown_backend_is_refused_by_name() -> None:
    text = _refusal("--attention-backend", "relayed")
    assert "'RELAYED'" in text and "RELAY" in text.split("Valid options are")[1]


def test_an_unknown_setting_is_refused_by_name() -> None:
    settings = json.dumps({"relay": {"min_saved": 3}})
    text = _refusal("--attention-backend", "relay", "--additional-config", settings)
    assert "relay.min_saved is unknown; known: enabled" in text
