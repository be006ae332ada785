"""Hot prefixes on the real engine: saved when it stops, found after the next start."""

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.random_model import VOCABULARY, write_random_model
from tests.engine.system_kv import run_program
from vllm_relay.system_kv.file import SystemKVFile

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 32
RNG = np.random.default_rng(11)
HOT = RNG.integers(3, VOCABULARY, size=12 * BLOCK).tolist()
PROMPTS = [[*HOT, *RNG.integers(3, VOCABULARY, size=40).tolist()] for _ in range(4)]


def test_a_hot_prefix_is_saved_at_the_end_and_found_after_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "remembered"
    engine: dict[str, Any] = {
        "model": str(write_random_model(tmp_path / "model", 4, 2, 64)),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 64,
        "dtype": "float32",
        "attention_backend": "relay",
        "additional_config": {"relay": {"system_kv": {"remember": str(folder)}}},
    }
    asked = ["generate", {"prompts": PROMPTS, "steps": 3, "one_by_one": True}]
    (first, _), log = run_program(tmp_path, engine, [asked, ["stop", None]])
    assert first["cached"] == [0, *[len(HOT)] * 3]
    (path,) = folder.iterdir()
    file = SystemKVFile(path)
    assert list(file.manifest.token_ids) == HOT and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert log.count("relay: remembered a prefix of 384 tokens") == 1

    (second, pool), log = run_program(tmp_path, engine, [asked, ["pool", []]])
    assert second["cached"] == [len(HOT)] * 4
    assert second["tokens"] == first["tokens"]
    np.testing.assert_allclose(second["logprobs"], first["logprobs"], atol=1e-3)
    assert pool["free"] == 63
    assert log.count("relay: loaded 1 remembered prefix: 384 tokens") == 1
