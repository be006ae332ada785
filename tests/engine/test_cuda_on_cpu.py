"""The CUDA backend under the real engine, on the CPU: its plan meets real block tables.

Kernels are stand-ins in plain torch (`run_cuda_on_cpu.py`), so this proves what is around them:
that the builder is called as it expects, that requests are grouped, and that answers stay.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.random_model import VOCABULARY, write_random_model
from tests.engine.engine import run_engine

STEPS = 6
# float32 all through: what is left is the order of sums. A wrong LSE moves far more.
CLOSE = 2e-3

pytestmark = pytest.mark.engine


def test_answers_are_those_of_vllms_own_backend(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", 4, 2, 32)
    tokens = iter(np.random.default_rng(1).integers(3, VOCABULARY, size=4_000).tolist())

    def take(count: int) -> list[int]:
        return [next(tokens) for _ in range(count)]

    first, second = take(270), take(150)
    prompts = [first + take(9), second + take(20), first + take(40), take(60), second + take(3)]
    engine: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
        "num_gpu_blocks_override": 128,
        "dtype": "float32",
    }
    spec = {"warm_up": [first, second], "prompts": prompts, "force": None}
    (want,) = run_engine(tmp_path, {**spec, "engine": engine, "passes": [(None, STEPS)]})["passes"]
    relay = {
        "attention_backend": "relay",
        "additional_config": {"relay": {"min_saved_tokens": 0}},
    }
    result = run_engine(
        tmp_path,
        {
            **spec,
            "force": want["tokens"],
            "engine": {**engine, **relay},
            "passes": [(None, STEPS), ("paged-lse", STEPS)],
        },
        "run_cuda_on_cpu.py",
        TRITON_INTERPRET="1",
    )
    good, planted = (np.array(p["logprobs"]) - want["logprobs"] for p in result["passes"])
    assert np.abs(good).max() < CLOSE
    assert np.abs(planted).max() > 10 * CLOSE, "the comparison does not see a wrong LSE"
    counted = result["counters"]
    assert counted["steps_relayed"] >= 2 * (STEPS - 2)
    assert counted["groups"] == 2 * counted["steps_relayed"]
    assert counted["requests"] == 4 * counted["steps_relayed"]
    # Eight full blocks of 32 and four.
    assert counted["tokens_shared"] == (8 + 4) * 32 * counted["steps_relayed"]
    assert "requests share" in result["log"]
