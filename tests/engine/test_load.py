"""Copies of shared KV are never stale while the engine evicts, preempts, aborts and reuses blocks
(contract 2).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.random_model import VOCABULARY, write_random_model
from tests.engine.engine import run_engine
from tests.engine.run_load import WAVES

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("load") / "model", 4, 2, 64)


def _run(model: Path, folder: Path, backend: str, watch: bool | None) -> dict[str, Any]:
    spec = {"model": str(model), "backend": backend, "watch": watch, "vocabulary": VOCABULARY}
    return run_engine(folder, spec, "run_load.py")


def test_under_load_no_copy_is_stale_and_answers_are_vllms_own(model: Path, tmp_path: Path) -> None:
    relay = _run(model, tmp_path, "relay", watch=True)
    watched = relay["watched"]
    assert relay["preemptions"] > 0
    assert relay["counters"]["steps_relayed"] > 5 * WAVES
    assert watched["dropped"] >= WAVES and watched["reads"] > 100
    assert watched["stale"] == 0

    stock = _run(model, tmp_path, "CPU_ATTN", watch=None)
    differences = []
    for ours, theirs in zip(relay["answers"], stock["answers"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, answer in ours.items():
            for (token, logprob), (other, other_logprob) in zip(answer, theirs[name], strict=True):
                if token != other:
                    break
                differences.append(logprob - other_logprob)
    # test_parity.py bounds the distance; stale or foreign KV would be off by more than 1
    # nearly everywhere
    assert len(differences) > 500
    assert np.sqrt(np.mean(np.square(differences))) < 0.15


def test_without_the_guard_the_same_load_reads_stale_copies(model: Path, tmp_path: Path) -> None:
    watched = _run(model, tmp_path, "relay", watch=False)["watched"]
    assert watched["dropped"] == 0
    assert watched["stale"] > 0
