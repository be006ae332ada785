"""Layers with a window, a soft cap, ALiBi and sinks: vLLM's own attention and the oracle."""

from typing import Any

import pytest
import torch

from tests.unit.backend.cpu_bench import BLOCK, assert_as_good, make_bench, make_step, outputs
from vllm_relay.ops.step import native as step_native

HEADS, KV_HEADS, DIM = 6, 2, 64
# Requests 0, 1 and 3 share four blocks, 2 and 4 nothing.
TABLES = [[1, 2, 3, 4, 10, 11], [1, 2, 3, 4, 12], [13, 14], [1, 2, 3, 4, 15, 16], [17]]
LENS = [6 * BLOCK - 3, 4 * BLOCK + 9, 50, 5 * BLOCK + 1, 7]
QUERIES = [1, 4, 33, 20, 7]
SCORES: dict[str, dict[str, Any]] = {
    "window within a block": {"window": 20},
    "window within the prefix": {"window": 80},
    "window longer than all": {"window": 1000},
    "soft cap": {"softcap": 3.0},
    "ALiBi": {"slopes": torch.linspace(0.01, 1, HEADS)},
    "sinks": {"sinks": torch.linspace(-2, 6, HEADS).bfloat16()},
    "gpt-oss": {"window": 70, "sinks": torch.linspace(-2, 6, HEADS).bfloat16()},
    "Gemma 2": {"window": 100, "softcap": 50.0},
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scores_are_as_exact_as_vllms_own(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bench = make_bench(HEADS, KV_HEADS, DIM, dtype, "vec", 21, scores=SCORES[name])
    for queries in ([1] * len(LENS), QUERIES):
        query = torch.randn(sum(queries), HEADS, DIM).to(dtype)
        assert_as_good(*outputs(bench, make_step(TABLES, LENS, queries), query), dtype)


def test_blocks_that_a_window_has_left_are_shared_by_those_who_see_them() -> None:
    scores = {"window": 2 * BLOCK}
    bench = make_bench(HEADS, KV_HEADS, DIM, torch.float32, "vec", 21, scores=scores)
    # Null blocks stand where a request sees nothing any more: 0 and 1 see unequal parts.
    tables = [[0, 0, 3, 4, 10], [0, 2, 3, 4, 12], [13, 14]]
    common = make_step(tables, [4 * BLOCK + 20, 3 * BLOCK + 30, 50])
    assert bench.builder.planner is not None
    (found,) = bench.builder.planner.plan(common).values()
    step, stats = found.step, found.stats
    assert (stats.groups, stats.requests, stats.tokens_shared) == (1, 2, 2 * BLOCK)
    (level,) = step.attention.plan.levels
    assert level.block_table[0].tolist() == [2, 3]
    assert level.key_starts is not None and level.key_starts[0] == BLOCK
    query = torch.randn(3, HEADS, DIM)
    assert_as_good(*outputs(bench, common, query), torch.float32)


@pytest.mark.parametrize("name", ["window within the prefix", "soft cap", "ALiBi", "sinks"])
@pytest.mark.parametrize("fault", ["edge", "cap", "slope", "sink"])
def test_planted_errors_are_seen(name: str, fault: str, monkeypatch: Any) -> None:
    of_name = {"edge": "window within the prefix", "cap": "soft cap", "slope": "ALiBi"}
    run = step_native.PreparedAttention.run

    def wrong(self: Any, query: Any, out: Any, **of_layer: Any) -> None:
        scores = self._call.scores
        if fault == "edge":
            scores.window += bool(scores.window)
        elif fault == "cap":
            scores.softcap *= 1.05
        elif fault == "slope" and of_layer["slopes"] is not None:
            of_layer["slopes"] = of_layer["slopes"] * 1.05
        elif fault == "sink" and of_layer["sinks"] is not None:
            of_layer["sinks"] = of_layer["sinks"] + 0.05
        run(self, query, out, **of_layer)

    bench = make_bench(HEADS, KV_HEADS, DIM, torch.float32, "vec", 21, scores=SCORES[name])
    query = torch.randn(len(LENS), HEADS, DIM)
    monkeypatch.setattr(step_native.PreparedAttention, "run", wrong)
    relay, stock, exact = outputs(bench, make_step(TABLES, LENS), query)
    if of_name.get(fault, "sinks") == name:
        with pytest.raises(AssertionError):
            assert_as_good(relay, stock, exact, torch.float32)
    else:
        assert_as_good(relay, stock, exact, torch.float32)
