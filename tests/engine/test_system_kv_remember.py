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


ASKED: list[Any] = ["generate", {"prompts": PROMPTS, "steps": 3, "one_by_one": True}]
# The engine in the test's process, its workers in others.
TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
WAYS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor_parallel_size": 2},
    # Traced, not compiled: vLLM's CPU engine has no pipeline in eager mode.
    "pipeline": {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    },
}


def _engine(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(write_random_model(tmp_path / "model", 4, 2, 64)),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 64,
        "dtype": "float32",
        "attention_backend": "relay",
        "additional_config": {"relay": {"system_kv": {"remember": str(tmp_path / "remembered")}}},
    }


def _check(path: Path, prefix: list[int]) -> None:
    file = SystemKVFile(path)
    assert list(file.manifest.token_ids) == prefix and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [layer.kv_heads for layer in file.manifest.layers] == [2] * 4


def test_a_hot_prefix_is_saved_at_the_end_and_found_after_the_next_start(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    (first, _), log = run_program(tmp_path, engine, [ASKED, ["stop", None]])
    assert first["cached"] == [0, *[len(HOT)] * 3]
    (path,) = (tmp_path / "remembered").iterdir()
    _check(path, HOT)
    assert log.count("relay: remembered a prefix of 384 tokens") == 1

    (second, pool), log = run_program(tmp_path, engine, [ASKED, ["pool", []]])
    assert second["cached"] == [len(HOT)] * 4
    assert second["tokens"] == first["tokens"]
    np.testing.assert_allclose(second["logprobs"], first["logprobs"], atol=1e-3)
    assert pool["free"] == 63
    assert log.count("relay: loaded 1 remembered prefix: 384 tokens") == 1


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_save_one_file_and_load_it(way: str, tmp_path: Path) -> None:
    engine = {**_engine(tmp_path), **WAYS[way]}
    program = [ASKED, ["stop", None]]
    (first, _), log = run_program(tmp_path, engine, program, **TWO_WORKERS)
    (path,) = (tmp_path / "remembered").iterdir()
    _check(path, HOT)
    assert log.count("relay: remembered a prefix of 384 tokens") == 1
    for again, env in ((engine, TWO_WORKERS), (_engine(tmp_path), {})):
        (found,), _ = run_program(tmp_path, again, program[:1], **env)
        assert found["cached"] == [len(HOT)] * 4
        assert found["tokens"] == first["tokens"]
        np.testing.assert_allclose(found["logprobs"], first["logprobs"], atol=1e-3)
