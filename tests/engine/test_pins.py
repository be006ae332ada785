"""Prompts pinned in a running server by the commands, behind its key."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from transformers import AutoTokenizer, LlamaConfig

from benchmarks.harness.random_model import write_model
from tests.engine.engine import ROOT, SMOLLM2
from tests.engine.system_kv import run_relay
from vllm_relay.serving import processes
from vllm_relay.system_kv.file import SystemKVFile

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, KEY = 32, "a-key"
SYSTEM = 20 * "Answer as the author of this sentence would, and say which it was. "
TEXT = 12 * "A text with which completion prompts begin. "


class _Pinning:
    """A server that pins, and its folder of remembered files."""

    def __init__(self, url: str, model: Path, folder: Path) -> None:
        self.url, self.model, self.folder = url, str(model), folder
        self._client = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

    def relay(self, *arguments: Any, status: int = 0, key: str = KEY) -> str:
        return run_relay(*arguments, "--url", self.url, status=status, OPENAI_API_KEY=key)

    def found(self, *arguments: Any) -> Any:
        """The only engine's answer to a command."""
        (found,) = json.loads(self.relay(*arguments, "--json"))
        return found

    def cached_in_chat(self) -> int:
        """Prompt tokens that a chat under the system message finds."""
        messages: Any = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Why?"},
        ]
        done = self._client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=2
        )
        return self._cached(done.usage)

    def cached(self, prompt: Any) -> int:
        """Prompt tokens that a completion request finds."""
        done = self._client.completions.create(model=self.model, prompt=prompt, max_tokens=1)
        return self._cached(done.usage)

    def _cached(self, usage: Any) -> int:
        details = usage.prompt_tokens_details
        return details.cached_tokens or 0 if details else 0

    def flood(self, seed: int) -> None:
        """Cold prompts of three times the KV cache."""
        prompts = np.random.default_rng(seed).integers(1000, 40000, (16, 12 * BLOCK))
        self.cached(prompts.tolist())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Pinning]:
    folder = tmp_path_factory.mktemp("pins")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    model = write_model(folder / "model", config, 3)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SMOLLM2 / name, model)
    settings = {"system_kv": {"pins": True, "remember": str(folder / "kv")}}
    options = {
        "additional-config": json.dumps({"relay": settings}),
        "attention-backend": "relay",
        "api-key": KEY,
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-seqs": 4,
        "block-size": BLOCK,
        "num-gpu-blocks-override": 64,
    }
    flags = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    flags += ["--enforce-eager", "--enable-prompt-tokens-details"]
    env = {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with processes.serving(model, flags, folder / "server.log", env=env) as started:
        yield _Pinning(started.url, model, folder / "kv")


def test_a_system_prompt_never_seen_is_pinned_saved_and_unpinned(
    server: _Pinning, tmp_path: Path
) -> None:
    (tmp_path / "system.txt").write_text(SYSTEM)
    pinned = server.found("pin", "--system-prompt", tmp_path / "system.txt")["pinned"]
    assert (
        pinned["tokens"]
        == pinned["blocks"] * BLOCK
        > 0.8 * len(AutoTokenizer.from_pretrained(server.model)(SYSTEM)["input_ids"])
    )
    again = server.found("pin", "--system-prompt", tmp_path / "system.txt")["pinned"]
    assert again["label"] == pinned["label"]
    server.flood(1)
    assert server.cached_in_chat() == pinned["tokens"]
    (shown,) = server.found("list")["pins"]
    assert shown["label"] == pinned["label"] and shown["requests_hit"] >= 2

    (name,) = server.found("save")["saved"]
    tokens = SystemKVFile(server.folder / name).manifest.token_ids
    assert len(tokens) == pinned["tokens"]

    assert pinned["label"] in server.relay("unpin", pinned["label"])
    assert "nothing is pinned" in server.relay("list")
    server.flood(2)
    assert server.cached_in_chat() == 0


def test_a_text_is_pinned(server: _Pinning, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    pinned = server.found("pin", "--text", tmp_path / "text.txt")["pinned"]
    server.flood(3)
    assert server.cached(TEXT + "And it goes on.") == pinned["tokens"]
    server.relay("unpin", pinned["label"])


def test_bad_input_is_one_line(server: _Pinning, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "long.txt").write_text(20 * TEXT)
    (tmp_path / "short.txt").write_text("Too short.")
    for said, arguments, key in (
        ("401", ("pin", "--text", tmp_path / "text.txt"), "another"),
        ("maximum context length", ("pin", "--text", tmp_path / "long.txt"), KEY),
        ("less than one KV block of 32", ("pin", "--text", tmp_path / "short.txt"), KEY),
        ("no pin 'nobody'", ("unpin", "nobody"), KEY),
        ("give --system-prompt or --text", ("pin",), KEY),
    ):
        printed = server.relay(*arguments, status=1, key=key)
        assert said in printed and printed.count("\n") == 1, printed
    printed = run_relay("list", "--url", "http://localhost:1", status=1)
    assert "localhost:1" in printed and printed.count("\n") == 1, printed
