"""Hot prefixes in the real engine: found amid cold traffic that evicts them under LRU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.engine.arg_utils import EngineArgs

from benchmarks.harness.random_model import VOCABULARY, write_random_model
from tests.engine.system_kv import run_program
from vllm_relay import register
from vllm_relay.system_kv.file import SystemKVError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, POOL = 32, 64
RNG = np.random.default_rng(7)
HOT = RNG.integers(3, VOCABULARY, size=12 * BLOCK).tolist()


def _round(number: int) -> list[list[int]]:
    """One prompt under the hot prefix, and cold ones that go once round the whole pool."""
    rng = np.random.default_rng(100 + number)
    own = rng.integers(3, VOCABULARY, size=8).tolist()
    cold = rng.integers(3, VOCABULARY, size=(4, 18 * BLOCK)).tolist()
    return [[*HOT, *own], *cold]


def test_a_hot_prefix_is_found_with_learn_and_the_answers_are_the_same(tmp_path: Path) -> None:
    engine: dict[str, Any] = {
        "model": str(write_random_model(tmp_path / "model", 4, 2, 64)),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "block_size": BLOCK,
        "num_gpu_blocks_override": POOL,
        "dtype": "float32",
        "attention_backend": "relay",
    }
    prompts = [prompt for number in range(6) for prompt in _round(number)]
    asked = ["generate", {"prompts": prompts, "steps": 3, "one_by_one": True}]
    (stock, pool), _ = run_program(tmp_path, engine, [asked, ["pool", []]])
    engine["additional_config"] = {"relay": {"system_kv": {"learn": True}}}
    (learned, same, status), log = run_program(
        tmp_path, engine, [asked, ["pool", []], ["status", None]]
    )
    assert stock["cached"] == [0] * len(prompts)
    hot, cold = learned["cached"][:: len(_round(0))], sum(learned["cached"])
    assert hot == [0, 0, 0, *[len(HOT)] * 3] and cold == sum(hot)
    assert learned["tokens"] == stock["tokens"]
    np.testing.assert_allclose(learned["logprobs"], stock["logprobs"], atol=1e-3)
    assert same == pool and pool["free"] == POOL - 1
    assert status == []
    assert log.count("relay: system_kv.learn: hot prefixes may stay in 31 of 63 KV cache bl") == 1
    assert "system_kv.learn is off" not in log


def test_a_load_that_needs_the_whole_cache_finishes_with_as_few_preemptions(
    tmp_path: Path,
) -> None:
    engine: dict[str, Any] = {
        "model": str(write_random_model(tmp_path / "model", 4, 2, 64)),
        "skip_tokenizer_init": True,
        "max_model_len": (POOL - 1) * BLOCK,
        "max_num_seqs": 16,
        "block_size": BLOCK,
        "num_gpu_blocks_override": POOL,
        "disable_log_stats": False,
        "attention_backend": "relay",
    }
    # Eight tenants, two of them hot; sixteen requests at once need twice the blocks there are.
    rng = np.random.default_rng(8)
    prefixes = rng.integers(3, VOCABULARY, size=(8, 4 * BLOCK)).tolist()
    tenants = rng.choice(8, size=160, p=[0.35, 0.35, *[0.05] * 6])
    prompts = [prefixes[i] + rng.integers(3, VOCABULARY, size=BLOCK).tolist() for i in tenants]
    alone = rng.integers(3, VOCABULARY, size=(POOL - 1) * BLOCK - 8).tolist()
    program = [
        ["generate", {"prompts": prompts, "steps": 3 * BLOCK}],
        ["metric", "vllm:num_preemptions"],
        ["generate", {"prompts": [alone], "steps": 8}],
    ]
    (_, stock, expected), _ = run_program(tmp_path, engine, program)
    engine["additional_config"] = {"relay": {"system_kv": {"learn": True}}}
    (found, learned, last), log = run_program(tmp_path, engine, program)
    assert [len(tokens) for tokens in found["tokens"]] == [3 * BLOCK] * len(prompts)
    assert sum(found["cached"]) > 0 and last["tokens"] == expected["tokens"]
    assert stock > 50 and learned <= 1.01 * stock
    assert "system_kv.learn is off" not in log


def test_what_learn_and_remember_cannot_be_used_with_is_said_in_one_line(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", 4, 2, 64)
    register()

    def configure(remember: Path | None = None, **changes: Any) -> Any:
        given: dict[str, Any] = {"learn": True} if remember is None else {"remember": remember}
        settings = {"relay": {"system_kv": given}}
        arguments = EngineArgs(
            model=str(model), skip_tokenizer_init=True, additional_config=settings, **changes
        )
        return arguments.create_engine_config().kv_transfer_config

    given = configure()
    assert given.kv_connector == "SystemKVConnector"
    assert given.kv_connector_extra_config["learn"] is True
    with pytest.raises(SystemKVError, match=r"^system_kv\.learn cannot be used: prefix caching is"):
        configure(enable_prefix_caching=False)
    with pytest.raises(ValueError, match="--kv-offloading-size replaces the connector"):
        configure(kv_offloading_size=1.0)

    refused = r"^system_kv\.remember cannot be used: "
    with pytest.raises(SystemKVError, match=refused + "prefix caching is off"):
        configure(tmp_path / "kv", enable_prefix_caching=False)
    with pytest.raises(SystemKVError, match=refused + "the KV cache's dtype is fp8$"):
        configure(tmp_path / "kv", kv_cache_dtype="fp8")
    with pytest.raises(SystemKVError, match=r"config\.json: cannot be written: File exists$"):
        configure(model / "config.json")
    assert not (tmp_path / "kv").exists()
