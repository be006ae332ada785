"""The setting ``scrub`` finds stale packed blocks and wrong rows, and leaves right steps alone."""

from typing import Any

import pytest
import torch

from tests.unit.backend.cpu_bench import Bench, forward, make_bench, make_step, outputs
from vllm_relay import metrics
from vllm_relay.ops.step.native import NativeStep

STEP = make_step([[1, 2, 3, 10], [1, 2, 3, 15], [1, 2, 3, 17]], [97, 120, 128])


@pytest.fixture
def bench(monkeypatch: Any) -> Bench:
    monkeypatch.setattr(metrics, "_fallbacks", type(metrics._fallbacks)())
    torch.manual_seed(0)
    made = make_bench(8, 2, 64, torch.bfloat16, "vec", 21, scrub=True)
    made.plan_by()
    return made


def fallbacks() -> int:
    return metrics.counters()["fallbacks"]


def test_right_steps_pass(bench: Bench) -> None:
    for _ in range(20):
        query = torch.randn(3, 8, 64).bfloat16()
        relay, stock, _ = outputs(bench, STEP, query)
        assert not torch.equal(relay, stock)  # relayed
    assert fallbacks() == 0 and len(bench.impl.packed) == 1  # type: ignore[arg-type]


def test_a_packed_block_that_is_stale_is_found(bench: Bench) -> None:
    query = torch.randn(3, 8, 64).bfloat16()
    outputs(bench, STEP, query)
    bench.cache[2] += 1.0  # unseen: no step has written the block
    for _ in range(60):
        metadata = bench.builder.build(0, STEP)
        answer = forward(bench, metadata, query)
        if fallbacks():
            break
    assert fallbacks() == 1
    stock = super(type(bench.builder), bench.builder).build(0, STEP)
    assert torch.equal(answer, forward(bench, stock, query))


def test_a_wrong_row_is_found(bench: Bench, monkeypatch: Any) -> None:
    run = NativeStep.run

    def wrong(
        self: Any, query: Any, cache: Any, segments: Any, out: torch.Tensor, **of_layer: Any
    ) -> None:
        run(self, query, cache, segments, out, **of_layer)
        out += 0.5 * out.float().std()

    monkeypatch.setattr(NativeStep, "run", wrong)
    query = torch.randn(3, 8, 64).bfloat16()
    forward(bench, bench.builder.build(0, STEP), query)
    assert fallbacks() == 1
