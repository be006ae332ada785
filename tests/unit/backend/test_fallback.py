"""Whatever fails in relay, the step is vLLM's own, and the log says why in one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.backend.cpu_bench import Bench, forward, make_bench, make_step, outputs
from vllm_relay import metrics
from vllm_relay.backend import cpu, cpu_impl, step_planner
from vllm_relay.backend.fallback import MOST_FAILURES
from vllm_relay.ops.step.native import NativeStep
from vllm_relay.sharing import Planner

TABLES = [[1, 2, 3, 10], [1, 2, 3, 15], [1, 2, 3, 17]]
LENS = [97, 120, 128]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    monkeypatch.setattr(metrics, "_fallbacks", type(metrics._fallbacks)())
    monkeypatch.setattr(metrics, "_said", set())
    monkeypatch.setattr(metrics.logger, "propagate", True)
    caplog.set_level("WARNING", logger="vllm.relay")
    return lambda: [record.getMessage() for record in caplog.records]


def bench_of() -> tuple[Bench, torch.Tensor]:
    torch.manual_seed(0)
    return make_bench(8, 2, 64, torch.bfloat16, "vec", 21), torch.randn(3, 8, 64).bfloat16()


def fails_once(stock: Any, error: Exception) -> Any:
    """A method that raises at its first call."""
    calls = []

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise error
        return stock(*args, **kwargs)

    return method


@pytest.mark.parametrize(
    ("owner", "name", "doing", "first"),
    [
        (Planner, "plan", "planning", False),
        (step_planner, "make_plan", "planning", True),
        (NativeStep, "__init__", "planning", True),
        (step_planner, "context_of", "planning", False),
        (NativeStep, "go_on", "planning", False),
        (NativeStep, "run", "attention", False),
        (cpu_impl.RelayImpl, "kernel_layout", "attention", False),
    ],
)
@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("two\nlines")])
def test_a_failure_is_vllms_own_answer_and_the_next_step_is_relayed_again(
    owner: Any, name: str, doing: str, first: bool, error: Exception, lines: Any, monkeypatch: Any
) -> None:
    """At an engine's first step, or at one that differs from the last in its contexts only."""
    bench, query = bench_of()
    common = make_step(TABLES, LENS)
    _, stock, _ = outputs(bench, common, query)
    if first:
        bench, _ = bench_of()
    monkeypatch.setattr(owner, name, fails_once(getattr(owner, name), error))
    failed = forward(bench, bench.builder.build(0, common), query)
    assert torch.equal(failed, stock)
    assert metrics.counters()["fallbacks"] == metrics.counters()[f"fallbacks_{doing}"] == 1
    (line,) = lines()
    assert line.startswith(f"relay: {doing} failed and is left to vLLM's own attention: ")
    assert str(error).replace("\n", " ") in line
    outputs(bench, common, query)
    assert metrics.counters()["fallbacks"] == 1


def test_after_some_failures_relay_is_off(lines: Any, monkeypatch: Any) -> None:
    bench, _ = bench_of()
    common = make_step(TABLES, LENS)

    def plan(*args: Any) -> Any:
        raise ValueError("always")

    monkeypatch.setattr(Planner, "plan", plan)
    for _ in range(MOST_FAILURES + 2):
        metadata = bench.builder.build(0, common)
        assert type(metadata) is cpu.CPUAttentionMetadata
    assert bench.builder.planner is None
    assert metrics.counters()["fallbacks"] == MOST_FAILURES
    cause, off = lines()
    assert cause.endswith("ValueError: always")
    assert off == (
        "relay: switched off for these layers until the engine is restarted, after 3 failures"
    )


def test_packed_segments_are_forgotten_where_planning_fails(lines: Any, monkeypatch: Any) -> None:
    bench, query = bench_of()
    packed = bench.plan_by()
    common = make_step(TABLES, LENS)
    outputs(bench, common, query)
    assert len(packed) == 1
    monkeypatch.setattr(Planner, "plan", fails_once(Planner.plan, ValueError("once")))
    bench.builder.build(0, common)
    assert not packed


WIDE, SPREAD = torch.zeros(3, 8, 128).bfloat16(), torch.zeros(3, 8, 128).bfloat16()[:, :, ::2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"query": WIDE.half()}, "float16 queries of a torch.bfloat16 KV cache"),
        ({"output": WIDE.float()}, "float32 outputs of a torch.bfloat16 KV cache"),
        ({"query": WIDE}, "query: expected [3, 8, 64], channels adjacent; got [3, 8, 128]"),
        ({"output": SPREAD}, "out: expected [3, 8, 64], channels adjacent; got [3, 8, 64]"),
        ({"query": WIDE[:2, :, :64]}, "query: expected [3, 8, 64]"),
        ({"output_scale": torch.ones(1)}, None),
    ],
    ids=["query-dtype", "output-dtype", "head-size", "channels", "rows", "quantized-output"],
)
def test_tensors_that_the_kernels_do_not_read_are_vllms_own(
    given: dict[str, torch.Tensor], said: str | None, lines: Any
) -> None:
    bench, query = bench_of()
    metadata = bench.builder.build(0, make_step(TABLES, LENS))
    assert isinstance(metadata, cpu_impl.RelayMetadata)
    seen: list[Any] = []
    more = {"query": query, "output": query.clone()} | given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cpu_impl.CPUAttentionBackendImpl, "forward", lambda *args, **kw: seen.append((args, kw))
        )
        bench.impl.forward(
            bench.layer, more.pop("query"), query, query, bench.cache, metadata,
            more.pop("output"), **more,
        )  # fmt: skip
    assert len(seen) == 1 and seen[0][1] == more
    assert [said in line for line in lines()] == ([] if said is None else [True])


def test_a_failure_at_the_start_leaves_all_steps_to_vllm(lines: Any, monkeypatch: Any) -> None:
    def costs(*args: Any) -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cpu, "load_or_measure", costs)
    bench = make_bench(8, 2, 64, torch.bfloat16, "vec", 21, min_saved_tokens=None)
    assert bench.builder.planner is None
    assert type(bench.builder.build(0, make_step(TABLES, LENS))) is cpu.CPUAttentionMetadata
    (line,) = lines()
    assert "start failed" in line and "home directory" in line
