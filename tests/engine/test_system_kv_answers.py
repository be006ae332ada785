"""A restart with a file answers as one without, in SmolLM2 under a system prompt.

In fp32 the answers are the same token for token. In bf16 two ways to compute the same KV differ by
rounding, which flips near ties; there the rule of test_parity.py bounds the log-probabilities.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.harness.chat import licence_prompt, questions
from tests.engine.engine import SMOLLM2
from tests.engine.parity import distances
from tests.engine.system_kv import BLOCK, run_program, run_relay
from vllm_relay.system_kv.file import SystemKVFile

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 10
MAX_MODEL_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class Service:
    """A system prompt of this many tokens, and requests that each begin with it."""

    folder: Path
    tokens: int
    requests: int

    @property
    def system(self) -> str:
        return licence_prompt(Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json")), self.tokens)

    def build(self, dtype: str) -> Path:
        prompt, file = self.folder / "licence.txt", self.folder / f"{dtype}.relay"
        prompt.write_text(self.system)
        options = ("--enforce-eager", "--max-model-len", MAX_MODEL_LEN, "--dtype", dtype)
        given = ("--model", SMOLLM2, "--system-prompt", prompt, "-o", file)
        run_relay("build", *given, *options)
        return file

    def answers(self, dtype: str, file: Path | None = None, force: Any = None) -> dict[str, Any]:
        """The first request alone, all but the last at once, the last alone; answers joined.

        force: tokens that each request must produce.
        """
        from transformers import AutoTokenizer

        tokenizer, system = AutoTokenizer.from_pretrained(SMOLLM2), self.system

        def render(question: str) -> list[int]:
            chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            return list(tokenizer.encode(text, add_special_tokens=False))

        prompts = [render(question) for question in questions(self.requests)]
        settings = {"min_saved_tokens": 0, "system_kv": [] if file is None else str(file)}
        engine = {
            "model": str(SMOLLM2),
            "dtype": dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": 1024,
            "attention_backend": "CPU_ATTN" if file is None else "relay",
            "additional_config": {"relay": settings},
        }
        last = self.requests - 1
        program = [
            [
                "generate",
                {"prompts": prompts[part], "steps": STEPS, "force": force[part] if force else None},
            ]
            for part in (slice(0, 1), slice(1, last), slice(last, None))
        ]
        results, _ = run_program(self.folder, engine, program)
        return {key: [x for result in results for x in result[key]] for key in results[0]}


def test_the_first_and_the_fiftieth_request_answer_as_without_the_file(tmp_path: Path) -> None:
    service = Service(folder=tmp_path, tokens=1500, requests=50)
    file = service.build("float32")
    stored = SystemKVFile(file).manifest.tokens
    assert stored >= 1500
    exact = service.answers("float32")
    assert exact["cached"][0] == 0
    loaded = service.answers("float32", file)
    assert loaded["cached"][0] == loaded["cached"][-1] == stored // BLOCK * BLOCK
    for i in (0, -1):
        assert loaded["tokens"][i] == exact["tokens"][i]
    same = sum(a == b for a, b in zip(loaded["tokens"], exact["tokens"], strict=True))
    assert same == service.requests


def test_in_bf16_a_file_brings_no_more_than_rounding(tmp_path: Path) -> None:
    service = Service(folder=tmp_path, tokens=500, requests=8)
    exact = service.answers("float32")
    force = exact["tokens"]
    bound = 2 * distances(service.answers("bfloat16", force=force), exact)
    found = distances(service.answers("bfloat16", service.build("bfloat16"), force), exact)
    print(f"(rms, p99.9): bound {bound} with the file {found}")
    assert (found <= bound).all()
