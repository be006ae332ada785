"""``vllm-relay doctor`` on engines."""

import json
import subprocess
import sys

import pytest

from benchmarks.harness.architectures import ARCHITECTURES
from benchmarks.harness.random_model import write_model
from tests.engine.engine import environment

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "vllm_relay.cli", "doctor", *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three layers with a window of 256 tokens and one without; weights are not read."""
    folder = write_model(tmp_path_factory.mktemp("gemma"), ARCHITECTURES["gemma-3"]())
    (folder / "model.safetensors").unlink()
    return str(folder)


def test_each_layer_is_told(gemma: str) -> None:
    reads = '{"relay": {"min_saved_tokens": 4096}}'
    done = run(gemma, "--json", "--max-model-len", "2048", "--additional-config", reads)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["environment"]["relay"] == "usable"
    layers = found["layers"]
    names = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    assert [layer["name"] for layer in layers] == names
    assert [layer["window"] for layer in layers] == [256, 256, 256, 0]
    assert {(x["kind"], x["heads"], x["kv_heads"], x["head_size"]) for x in layers} == {
        ("decoder attention", 4, 1, 128)
    }
    assert {(x["reason"], x["kv_bytes"]) for x in layers} == {(None, 2 * 128 * 2)}
    # With 256 tokens of its own, a request sees nothing else in the window.
    assert [x["pays_from"] for x in layers] == [[None] * 4] * 3 + [[17, 5, 2, 2]]
    assert found["system_kv"] == "KV of 4 layers, of 3 the last window"


def test_layers_that_stay_with_vllm_are_told_with_the_reason(gemma: str) -> None:
    off = '{"relay": {"enabled": false}}'
    done = run(gemma, "--max-model-len", "2048", "--additional-config", off)
    assert done.returncode == 0, done.stderr[-3000:]
    line = "decoder attention, 4/1 heads of 128{}: vLLM's own, switched off by additional_config"
    lines = done.stdout.splitlines()
    assert "  3 x " + line.format(", window 256") in lines and "  1 x " + line.format("") in lines
    assert "KV           2,048 bytes per token and rank, 0 in relayed layers" in done.stdout


def test_without_a_model_the_machine_is_told() -> None:
    done = run()
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "relay        usable"
    done = run("some-model", "--json", VLLM_PLUGINS="")
    assert done.returncode == 1 and list(json.loads(done.stdout)) == ["environment"]
    assert "it is not installed, or VLLM_PLUGINS excludes it" in done.stdout
    done = run("--max-model-len", "64", "some-model")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("vllm-relay: the model comes first:")
