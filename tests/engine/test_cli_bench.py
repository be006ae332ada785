"""``vllm-relay bench`` with servers."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.engine.engine import SMOLLM2
from tests.unit.test_cli_bench import run


@pytest.mark.slow
def test_a_model_and_a_prompt_are_served_with_and_without_relay(tmp_path: Path) -> None:
    """Two systems of the four: each is a server to start."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("You are a careful assistant. Answer in one short sentence. " * 25)
    done = run(
        *("--model", SMOLLM2, "--system-prompt", prompt, "--requests", 4, "--tokens", 6),
        *("--repeats", 1, "--rate", 50, "--bound", 100, "--json", "--no-system-kv"),
        # float32: oneDNN's bf16 is 8 times slower on CPUs without AVX-512
        *("--enforce-eager", "--max-model-len", 1024, "--max-num-seqs", 4, "--dtype", "float32"),
    )
    shown = json.loads(done.stdout)
    keys = ["stock", "relay"]
    assert [gain["system"] for gain in shown["gains"]] == keys
    for gain in shown["gains"]:
        assert gain["tokens_per_s"] > 0
    assert shown["sustained"] == dict.fromkeys(keys, 50)
    assert shown["provenance"]["vllm"] == version("vllm") and shown["provenance"]["device"]
    for found in shown["rows"]:
        assert found["requests"] == 4 and 0 <= found["logprob_rms"] < 0.1
        assert found["ttft_mean_s"] > 0 and found["normalized_s"] > 0
    assert "checking that all answer alike" in done.stderr
