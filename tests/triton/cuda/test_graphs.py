"""The two sets of full CUDA graphs, on CPU tensors."""

import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from tests.triton.cuda.cuda_bench import Bench, Step, make_config, random_step
from tests.triton.cuda.cuda_cases import ALONE, CLOSE, SHARED, owned, relayed
from vllm_relay.backend import cuda_history
from vllm_relay.backend.cuda_graphs import graphs


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
    assert set(manager.graphs) == set(manager._relay_plain_graphs) == {Desc(8), Desc(4), Desc(1)}
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
    assert not graphs.have_both and not manager._relay_plain_graphs
