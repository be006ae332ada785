"""Relay beside a KV connector that loads KV: relayed, right, and no packed segment is stale."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.random_model import VOCABULARY, write_random_model
from tests.engine.system_kv import BLOCK, run_program
from tests.soak.differential import differences

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RNG = np.random.default_rng(9)
# Prefixes of one full block, and tokens of requests that share nothing.
PREFIXES = RNG.integers(3, VOCABULARY, size=(2, BLOCK + 20)).tolist()
FIRST, LAST, OTHER = (RNG.integers(3, VOCABULARY, size=n).tolist() for n in (100, 600, 700))
MEMBERS, STEPS = 4, 12
# Blocks that a wave takes, all of the pool: 1, 5 by the members, and 5; or 6 and 5. Full blocks are
# freed behind the others: the second wave's prefix gets the block of the first's, in the next step.
POOL = 12


def _wave(kind: int) -> list[Any]:
    members = [[*PREFIXES[kind], 900 + i, 7] for i in range(MEMBERS)]
    prompts = [OTHER, *members] if kind else [FIRST, *members, LAST]
    return ["generate", {"prompts": prompts, "steps": STEPS}]


def _answers(wave: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(wave["tokens"], wave["logprobs"], strict=True)
    return {str(i): list(zip(*of, strict=True)) for i, of in enumerate(pairs)}


def test_loaded_kv_is_relayed_and_no_packed_segment_is_stale(tmp_path: Path) -> None:
    engine = {
        "model": str(write_random_model(tmp_path / "model", 4, 2, 64)),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "num_gpu_blocks_override": POOL,
        "dtype": "float32",
    }
    stock, _ = run_program(tmp_path, engine, [_wave(0), _wave(1)])
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    # The first two waves store KV; those after a reset load it.
    waves = [part for kind in (0, 1, 0, 1, 0, 1) for part in (["reset", None], _wave(kind))]
    program = [
        ["rpc", ["watch", True]],
        *waves,
        ["counters", None],
        ["rpc", ["watched"]],
        ["rpc", ["plant", "lse"]],
        _wave(1),
        ["rpc", ["plant", "loads"]],
        *waves,
        ["rpc", ["watched"]],
    ]
    relay = {"additional_config": {"relay": {"min_saved_tokens": 0}}, "attention_backend": "relay"}
    results, log = run_program(
        tmp_path, {**engine, **relay, "kv_transfer_config": connector}, program
    )
    found, results = results[2 : len(waves) + 1 : 2], results[len(waves) + 1 :]
    (counters,), (watched,), _, planted, _, *_, (unguarded,) = results
    assert "relay: not used" not in log
    assert counters["steps_relayed"] >= 6 * STEPS - 6 and counters["fallbacks"] == 0
    for i, wave in enumerate(found):
        assert i < 2 or wave["cached"][1 : 1 + MEMBERS] == [BLOCK] * MEMBERS
        assert differences([_answers(wave)], [_answers(stock[i % 2])])[0] == []
    assert log.count("Inject KV cache of 128 tokens") >= 4  # once per wave, then shared
    assert watched["reads"] > 100 and watched["stale"] == 0
    # With an error planted: in the answers, and where loads are not followed.
    assert differences([_answers(planted)], [_answers(stock[1])])[0]
    assert unguarded["stale"] > 0
