"""Failures on the host of the CUDA backend: vLLM's own attention answers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton.cuda.cuda_bench import Bench, Step, make_config
from vllm_relay import metrics
from vllm_relay.backend import cuda, cuda_impl
from vllm_relay.backend.cuda_graphs import graphs
from vllm_relay.backend.fallback import MOST_FAILURES

STEP = Step([([1, 2, 3, 4], 60, 1), ([1, 2, 3, 5], 52, 1), ([1, 2, 3, 6], 49, 1)])


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: Any) -> Bench:
    monkeypatch.setattr(metrics, "_fallbacks", type(metrics._fallbacks)())
    bench = Bench(make_config(tmp_path, "NONE"))
    for _ in range(4):  # the host hears of sharing some steps later
        bench.build(STEP)
    assert isinstance(bench.build(STEP), cuda.RelayMetadata)
    return bench


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no\nmemory")


@pytest.mark.parametrize(
    ("owner", "name", "doing"),
    [
        (cuda.DevicePlan, "update", "planning"),
        (cuda_impl.Schedules, "add", "planning"),
        (cuda.SharingHistory, "begin_step", "planning"),
        (cuda_impl, "paged_relay", "attention"),
    ],
)
def test_a_failure_is_vllms_own_answer(
    bench: Bench, owner: Any, name: str, doing: str, monkeypatch: Any
) -> None:
    q = bench.queries(3)
    stock = bench.stock(STEP, q)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        for step in range(MOST_FAILURES + 2):
            metadata = bench.build(STEP)
            for layer in (0, 1):
                assert torch.equal(bench.forward(metadata, q, layer), bench.stock(STEP, q, layer))
            expected = min(step + 1, MOST_FAILURES)
            assert metrics.counters()[f"fallbacks_{doing}"] == expected
    off = bench.build(STEP)
    assert not isinstance(off, cuda.RelayMetadata) and torch.equal(bench.forward(off, q), stock)


def test_where_all_graphs_read_the_plan_its_failure_is_an_error(
    tmp_path: Path, monkeypatch: Any
) -> None:
    bench = Bench(make_config(tmp_path, "FULL_DECODE_ONLY"))
    monkeypatch.setattr(graphs, "have_both", False)
    monkeypatch.setattr(cuda.DevicePlan, "update", fail)
    with pytest.raises(RuntimeError, match="memory"):
        bench.build(STEP)
    monkeypatch.setattr(graphs, "have_both", True)
    # Ranks of a tensor-parallel group must not replay different graphs.
    parallel = bench.builder.vllm_config.parallel_config
    monkeypatch.setattr(parallel, "tensor_parallel_size", 2)
    with pytest.raises(RuntimeError, match="memory"):
        bench.build(STEP)
    for _ in range(MOST_FAILURES):
        bench.builder.failed("attention", RuntimeError("eager"))
    with pytest.raises(RuntimeError, match="memory"):
        _build_often(bench)
    monkeypatch.setattr(parallel, "tensor_parallel_size", 1)
    _build_often(bench)


def _build_often(bench: Bench) -> None:
    """Build steps until one of them is due to be planned."""
    for _ in range(20):
        assert not isinstance(bench.build(STEP), cuda.RelayMetadata)
