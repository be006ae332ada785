"""The two sets of full CUDA graphs, on CPU tensors."""

import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from tests.triton.cuda.cuda_bench import Bench, Step, make_config, random_step
from tests.triton.cuda.cuda_cases import ALONE, CLOSE, SHARED, owned, relayed
from tests.triton.cuda.frozen_host import host_view
from vllm_relay import metrics
from vllm_relay.backend import cuda_history, cuda_impl, cuda_support
from vllm_relay.backend.cuda_graphs import graphs
from vllm_relay.config import RelayConfig


@dataclass(frozen=True)
class Desc:
    """Of vLLM's BatchExecutionDescriptor what capture and replay read."""

    num_reqs: int
    cg_mode: Any = CUDAGraphMode.FULL
    num_ubatches: int = 1


class Graph:
    """A CUDA graph as far as the host can tell: host values and addresses of capture."""

    open: "Graph | None" = None

    def __init__(self) -> None:
        self.replay: Any = None

    @staticmethod
    @contextmanager
    def capture(graph, *args, **kwargs):
        Graph.open = graph
        yield
        Graph.open = None


@pytest.fixture
def manager(monkeypatch) -> Any:
    """vLLM's own manager of graphs, wrapped, over `Graph`s."""
    names = ("capture", "run_fullgraph")
    for name in names:
        stock = getattr(cudagraph_utils.CudaGraphManager, name)
        monkeypatch.setattr(
            cudagraph_utils.CudaGraphManager, name, getattr(stock, "__wrapped__", stock)
        )
    monkeypatch.setattr(graphs, "have_both", False)
    monkeypatch.setattr(graphs, "_builders", weakref.WeakValueDictionary())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Graph.capture)
    for name, value in (
        ("graph_capture", lambda **kwargs: nullcontext()),
        ("capture_pool", lambda *args: nullcontext()),
        ("current_stream", lambda: None),
        ("is_global_first_rank", lambda: False),
    ):
        monkeypatch.setattr(cudagraph_utils, name, value, raising=False)
    made = object.__new__(cudagraph_utils.CudaGraphManager)
    vars(made).update(
        graphs={}, device=None, pool=(0, 1), use_breakable_cg=False, ubatch_runner=None,
        vllm_config=None, _max_full_descs_to_capture=None, _capture_mem_samples=None,
        _capture_descs={CUDAGraphMode.FULL: [Desc(8), Desc(4), Desc(1)]},
    )  # fmt: skip
    return made


@pytest.fixture
def wrapper(monkeypatch) -> Any:
    """vLLM's own wrapper of runner V1 around a forward pass, over `Graph`s: ``(forward, desc)``."""
    from vllm.compilation import cuda_graph

    context = SimpleNamespace(batch_descriptor=None, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Graph.capture)
    for name, value in (
        ("is_forward_context_available", lambda: True),
        ("get_forward_context", lambda: context),
        ("set_graph_pool_id", lambda pool: None),
        ("capture_pool", lambda *args: nullcontext()),
        ("current_stream", lambda: None),
        ("weak_ref_tensors", lambda tensors: tensors),
        ("current_platform", SimpleNamespace(get_global_graph_pool=lambda: (0, 1))),
    ):
        monkeypatch.setattr(cuda_graph, name, value, raising=False)

    def make(forward: Any, config: Any) -> Any:
        made = cuda_graph.CUDAGraphWrapper(forward, config, CUDAGraphMode.FULL)

        def call(rows: int) -> Any:
            context.batch_descriptor = rows
            return made()

        return call

    return make


def capture_graphs(manager, bench) -> list[tuple[int, bool, torch.Tensor]]:
    """Capture all; each replay appends its size, whether it relays, and what it wrote."""
    replays: list[tuple[int, bool, torch.Tensor]] = []

    def create_forward_fn(desc, warmup):
        rows = desc.num_reqs
        metadata = bench.build(Step([([1], 1, 1)] * rows, rows), capture=True)
        q = bench.queries(rows)

        def forward(mode) -> None:
            def replay() -> None:
                replays.append((rows, relayed(metadata), bench.forward(metadata, q)))

            if Graph.open is not None:
                Graph.open.replay = replay
            replay()

        return forward

    manager.capture(create_forward_fn)
    replays.clear()
    return replays


def replay(manager, bench, replays, step: Step) -> bool:
    """Build and replay a step as runner V2 does; returns whether it was relayed."""
    bench.build(step)
    manager.run_fullgraph(Desc(step.padded_rows))
    rows, with_relay, out = replays.pop()
    assert rows == step.padded_rows and not replays
    want = bench.stock(step, bench.queries(rows))
    torch.testing.assert_close(out[: owned(step)], want[: owned(step)], **CLOSE)
    return with_relay


def test_runner_v2_replays_graphs_without_relay_where_nothing_is_shared(folder, manager) -> None:
    bench = Bench(make_config(folder))
    replays = capture_graphs(manager, bench)
    assert graphs.have_both
    assert set(manager.graphs) == {Desc(8), Desc(4), Desc(1)}
    # A single request shares nothing.
    assert set(manager._relay_plain_graphs) == {Desc(8), Desc(4)}
    assert list(manager._capture_descs) == [CUDAGraphMode.FULL]
    shared, alone = Step(SHARED.rows, 8), Step(ALONE.rows, 8)
    steps = cuda_history.PROBE_STEPS + cuda_history.HEARD_AFTER + 2
    relays = [replay(manager, bench, replays, shared) for _ in range(steps)]
    assert not relays[0] and all(relays[-2:])
    relays = [replay(manager, bench, replays, alone) for _ in range(4)]
    assert relays == [True] * cuda_history.HEARD_AFTER + [False] * (4 - cuda_history.HEARD_AFTER)
    rng = np.random.default_rng(4)
    relays = []
    for _ in range(24):
        relays.append(replay(manager, bench, replays, random_step(rng, padded=8)))
        replay(manager, bench, replays, Step(SHARED.rows[:1], 1))
    assert any(relays)


def test_a_graph_with_relay_needs_the_plan_of_every_builder(folder, manager) -> None:
    bench = Bench(make_config(folder))
    replays = capture_graphs(manager, bench)
    step = Step(SHARED.rows, 8)
    while not replay(manager, bench, replays, step):
        pass
    # Another builder of the same layers takes the place of the first, and has not planned.
    other = Bench(make_config(folder)).builder
    assert not replay(manager, bench, replays, step)
    graphs.follow(bench.builder)
    assert replay(manager, bench, replays, step)
    other.layer_names = ["another.layer"]
    graphs.follow(other)
    assert not replay(manager, bench, replays, step)
    other.planned = True
    assert replay(manager, bench, replays, step)


def test_a_plan_that_no_graph_reads_gets_no_schedules(folder, manager, monkeypatch) -> None:
    bench, made = Bench(make_config(folder)), []
    stock = cuda_impl.Schedules.add
    monkeypatch.setattr(cuda_impl.Schedules, "add", lambda *a: (made.append(1), stock(*a))[1])
    capture_graphs(manager, bench)

    def probes() -> int:
        made.clear()
        before = bench.builder.device_plan.updates
        for _ in range(2 * cuda_history.PROBE_STEPS):
            bench.build(Step(ALONE.rows, 8))
        return bench.builder.device_plan.updates - before

    assert probes() == 2 and not made
    # A graph with relay reads the plans of both builders.
    other = Bench(make_config(folder)).builder
    other.layer_names = ["another.layer"]
    graphs.follow(other)
    graphs.have_both = True
    assert probes() == len(made) == 2


def test_a_group_that_never_shares_does_not_keep_another_from_relay(folder, manager) -> None:
    """As the windowed layers of a model with full attention: rows beyond their window."""
    bench, other = Bench(make_config(folder)), Bench(make_config(folder))
    other.builder.layer_names = ["another.layer"]
    graphs.follow(bench.builder)
    graphs.follow(other.builder)
    graphs.have_both = True
    relays = []
    for _ in range(3 * cuda_history.PROBE_STEPS):
        bench.build(SHARED)
        other.build(ALONE)
        relays.append(graphs.relayed())
    assert all(relays[cuda_history.PROBE_STEPS :])


@pytest.mark.parametrize("one_set", ["runner V1", "data parallelism"])
def test_one_set_of_graphs_is_left_to_vllm_unless_asked_for(folder, monkeypatch, one_set) -> None:
    config = make_config(folder, min_saved_tokens=None)
    # vLLM refuses runner V2 on a CPU where it reads its arguments.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(one_set != "runner V1")))
    if one_set == "data parallelism":
        config.parallel_config.data_parallel_size = 2
    builder = Bench(config).builder
    line = f"one set of CUDA graphs ({one_set}), unless min_saved_tokens or a system KV is set"
    assert any(line in said for said in metrics._said)
    for asked in ({"min_saved_tokens": 0}, {"system_kv": "a.relay"}):
        relay = RelayConfig.from_additional_config({"relay": asked})
        assert cuda_support.default_refusal(builder, config, relay) is None
    builder.use_full_cuda_graph = False
    assert cuda_support.default_refusal(builder, config, RelayConfig()) is None


def test_without_a_second_set_of_graphs_every_step_is_planned(folder, manager) -> None:
    """As on runner V1."""
    bench = Bench(make_config(folder))
    for _ in range(3):
        bench.build(Step(ALONE.rows, 8))
        assert bench.builder.planned


def test_graphs_are_captured_once_where_nothing_relays(folder, manager) -> None:
    bench = Bench(make_config(folder, enabled=False))
    graphs.add_plain()
    capture_graphs(manager, bench)
    assert set(manager.graphs) == {Desc(8), Desc(4), Desc(1)}
    assert not manager._relay_plain_graphs


def speculative(config: Any, queries: int) -> Any:
    if queries > 1:
        config.speculative_config = SimpleNamespace(
            method="ngram", num_speculative_tokens=queries - 1
        )
    return config


@pytest.mark.parametrize("queries", [1, 3])
def test_runner_v2_replays_what_each_step_would_launch(folder, manager, queries) -> None:
    bench = Bench(speculative(make_config(folder), queries))
    captured = {}

    def create_forward_fn(desc, warmup):
        rows = desc.num_reqs
        metadata = bench.build(Step([([1], queries, queries)] * rows, rows), capture=True)
        q = bench.queries(rows * queries)

        def forward(mode) -> None:
            if relayed(metadata):
                with host_view(bench) as calls:
                    bench.forward(metadata, q)
                captured[rows] = calls

        return forward

    manager.capture(create_forward_fn)
    assert set(captured) == {8, 4}
    rng, compared = np.random.default_rng(queries), 0
    for i in range(16):
        step = random_step(rng, queries=queries, padded=(8, 4)[i % 2])
        metadata = bench.build(step)
        if relayed(metadata):
            with host_view(bench) as calls:
                bench.forward(metadata, bench.queries(step.padded_rows * queries))
            assert calls == captured[step.padded_rows]
            compared += 1
    assert compared > 3


@pytest.mark.parametrize("queries", [1, 3])
def test_runner_v1_replays_what_each_step_would_launch(folder, wrapper, queries) -> None:
    config = speculative(make_config(folder), queries)
    bench = Bench(config)
    captured, current = {}, {}

    def forward() -> torch.Tensor:
        metadata, q = current["metadata"], current["q"]
        with host_view(bench) as calls:
            out = bench.forward(metadata, q)
        if Graph.open is not None:
            captured[current["rows"]] = calls
            # With the metadata of the capture, and what the buffers then hold.
            Graph.open.replay = lambda: out.copy_(bench.forward(metadata, q))
        return out

    call = wrapper(forward, config)
    for rows in (8, 4):
        step = Step([([1], queries, queries)] * rows, rows)
        current |= {"metadata": bench.build(step, capture=True), "rows": rows}
        current["q"] = bench.queries(rows * queries)
        call(rows)
    rng, compared = np.random.default_rng(queries), 0
    for i in range(10):
        step = random_step(rng, queries=queries, padded=(8, 4)[i % 2])
        q = bench.queries(step.padded_rows * queries)
        metadata = bench.build(step)
        got = call(step.padded_rows)
        torch.testing.assert_close(got[: owned(step)], bench.stock(step, q)[: owned(step)], **CLOSE)
        if relayed(metadata):
            with host_view(bench) as calls:
                bench.forward(metadata, q)
            assert calls == captured[step.padded_rows]
            compared += 1
    assert compared > 2


def test_a_host_value_that_moves_is_seen(folder) -> None:
    bench = Bench(make_config(folder))

    def calls_of(step: Step) -> list[Any]:
        metadata = bench.build(step, capture=True)
        with host_view(bench) as calls:
            bench.forward(metadata, bench.queries(8))
        return calls

    shared = Step(SHARED.rows, 8)
    first = calls_of(shared)
    assert len(first) == 4 and calls_of(Step(ALONE.rows, 8)) == first
    bench.buffers.lens = bench.buffers.lens.clone()
    assert calls_of(shared) == first  # a plan's context has lengths of its own
    bench.buffers.starts = bench.buffers.starts.clone()
    assert calls_of(shared) != first
