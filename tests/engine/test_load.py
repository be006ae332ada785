"""Copies of shared KV are never stale while the engine evicts, preempts, aborts and reuses blocks
(contract 2).
"""

from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.random_model import VOCABULARY, write_random_model
from tests.engine.engine import run_engine
from tests.engine.run_load import WAVES
from tests.soak.differential import OPTIONS, ROWS, compare, differences

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("load") / "model", 4, 2, 64)


def _run(model: Path, folder: Path, backend: str, watch: bool | None) -> dict[str, Any]:
    spec = {"model": str(model), "backend": backend, "watch": watch, "vocabulary": VOCABULARY}
    return run_engine(folder, spec, "run_load.py")


def test_under_load_no_copy_is_stale_and_answers_are_vllms_own(model: Path, tmp_path: Path) -> None:
    relay = _run(model, tmp_path, "relay", watch=True)
    (watched,), (counters,) = relay["watched"], relay["counters"]
    assert relay["preemptions"] > 0
    assert counters["steps_relayed"] > 5 * WAVES
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
    (watched,) = _run(model, tmp_path, "relay", watch=False)["watched"]
    assert watched["dropped"] == 0
    assert watched["stale"] > 0


@pytest.mark.slow
def test_a_sample_of_the_differential_soak() -> None:
    """All of it: ``make soak PART=differential``."""
    row = {"block_size": 64, "chunked": True, "drafts": True, "lora": False, "salts": True}
    found = compare({**row, "system_kv": False, "workers": 1, "fast_prefill": False}, 5, 40)
    assert found["failures"] == 0
    assert min(found[name] for name in ("preemptions", "aborts", "resets", "packed_reads")) > 0
    assert found["tokens_compared"] > 1000


def test_differences_are_found() -> None:
    ours = [{"a": [(1, -1.0), (2, -1.0)], "b": [(1, -1.0)]}]
    assert differences(ours, ours) == ([], 3)
    # A tie, from where the answers part; then another log-probability, and a missing answer.
    assert differences(ours, [{"a": [(9, -1.0), (9, -9.0)], "b": [(1, -1.0)]}]) == ([], 2)
    assert differences(ours, [{"a": [(1, -1.0), (2, -1.1)]}]) == (
        ["b has one answer only", "a: token 1 is 2 with -1.0000, stock's 2 with -1.1000"],
        2,
    )


def test_the_rows_of_the_differential_soak_cover_all_pairs_of_options() -> None:
    for (a, of_a), (b, of_b) in combinations(OPTIONS.items(), 2):
        assert {(row[a], row[b]) for row in ROWS} == set(product(of_a, of_b))
