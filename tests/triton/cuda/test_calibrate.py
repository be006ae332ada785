"""Calibration on a GPU whose constants are known: a clock that counts what is read and computed."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import flash_attn

from tests.triton.cuda.cuda_bench import BLOCK, HEAD_SIZE, HEADS, KV_HEADS, Bench, make_config
from vllm_relay import metrics
from vllm_relay.backend import cuda_impl, cuda_support
from vllm_relay.calibration import cuda
from vllm_relay.sharing.cost import min_saved_tokens
from vllm_relay.sharing.cost_store import Constants, find_costs, save
from vllm_relay.sharing.gpu import HOST_CALL, L2_SHARE
from vllm_relay.validation import checked

NAME = "NVIDIA H100 80GB HBM3"
L2 = 160 << 10
KV = 2 * KV_HEADS * HEAD_SIZE * 4
FLOPS = 4 * HEADS * HEAD_SIZE
# Seconds per call, bytes from memory, from L2 and from beyond it, and of arithmetic.
CALL, MEMORY, NEAR, FAR, PAIR = 5e-6, 1 / 3e12, 1 / 9e12, 1 / 5e12, 1 / 400e12


class Clock:
    """FlashAttention that computes nothing and takes the time of a GPU."""

    def __init__(self) -> None:
        self.seconds, self.seen = 0.0, set()

    def flash_attention(self, *, q: Any, out: Any, cu_seqlens_q: Any, **given: Any) -> Any:
        self.seconds += CALL
        queries = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).tolist()
        near = int(L2_SHARE * L2 / KV)
        rows = zip(given["block_table"].tolist(), given["seqused_k"].tolist(), queries, strict=True)
        for blocks, length, count in rows:
            if not count:
                continue
            for at in range(0, length, BLOCK):
                tokens = min(BLOCK, length - at)
                again = blocks[at // BLOCK] in self.seen
                self.seen.add(blocks[at // BLOCK])
                rate = (FAR if at >= near else NEAR) if again else MEMORY
                self.seconds += tokens * KV * rate
            if not given["causal"]:
                self.seconds += count * length * FLOPS * PAIR
        return out.zero_(), torch.zeros(q.shape[1], len(q))

    def seconds_in_graph(self, work: Any, flush: torch.Tensor) -> float:
        self.seconds, self.seen = 0.0, set()
        work()
        return self.seconds


@pytest.fixture
def bench(folder, monkeypatch) -> Bench:
    clock = Clock()
    config = make_config(folder)
    config.scheduler_config.max_num_seqs = 32
    made = Bench(config)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", clock.flash_attention)
    monkeypatch.setattr(cuda, "seconds_in_graph", clock.seconds_in_graph)
    monkeypatch.setattr(cuda, "FLUSH_BYTES", 16)
    monkeypatch.setattr(cuda, "_free_bytes", lambda most: 64 << 20)
    device = SimpleNamespace(name=NAME, L2_cache_size=L2, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device_: device)
    return made


def worker_of(builder: Any) -> Any:
    group = SimpleNamespace(get_metadata_builder=lambda: builder)
    return SimpleNamespace(model_runner=SimpleNamespace(attn_groups=[[group]]))


def test_a_gpu_is_measured_and_its_costs_are_planned_by(bench, monkeypatch, tmp_path) -> None:
    (measured,) = cuda.Calibrator.measure_attention(worker_of(bench.builder))
    assert max(measured["errors"].values()) < 0.05
    found = checked(Constants, measured["constants"], "")
    for one, expected in (
        (found.stock.call, CALL),
        (found.stock.first + found.stock.read, MEMORY),
        (found.stock.read, NEAR),
        (found.stock.read + found.stock.far, FAR),
        (found.context.first + found.context.read, MEMORY),
        (found.system.call, CALL),  # relay has one more
        (found.system.first, MEMORY),
        (found.system.pair, PAIR),
    ):
        assert one == pytest.approx(expected, rel=0.1)

    monkeypatch.setenv("VLLM_RELAY_DEVICES", str(tmp_path / "devices.json"))
    monkeypatch.setattr(bench.builder, "device", torch.device("cuda"))
    before = cuda_support.predicted_minimum(bench.builder, graphs=True)
    save([found], tmp_path / "devices.json")
    shape = (HEADS, KV_HEADS, HEAD_SIZE)
    costs = find_costs(*shape, device=NAME, dtype="float32")
    assert not costs.guessed
    # Another variant of the GPU, as good as a name of it gets.
    other = find_costs(*shape, device="H100", dtype="float32")
    assert other.guessed and other.costs == costs.costs and NAME in other.source
    minimum = cuda_support.predicted_minimum(bench.builder, graphs=True)
    assert minimum == min_saved_tokens(costs.costs) != before
    in_no_graph = cuda_support.predicted_minimum(bench.builder, graphs=False)
    assert in_no_graph == math.ceil(HOST_CALL / costs.costs.stock.read)
    # By the data sheet where the file says nothing, or no JSON.
    save([replace(found, stock=replace(found.stock, read=0.0))], tmp_path / "devices.json")
    assert cuda_support.predicted_minimum(bench.builder, graphs=True) == before
    (tmp_path / "devices.json").write_text("no JSON")
    assert cuda_support.predicted_minimum(bench.builder, graphs=True) == before
    assert any("devices.json" in line for line in metrics._said)


def test_what_cannot_be_measured_is_named(bench, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "_free_bytes", lambda most: 1 << 20)
    with pytest.raises(ValueError, match="too little memory"):
        cuda.measure(bench.builder, bench.layers[0])
    with pytest.raises(ValueError, match="serves no layer"):
        cuda.Calibrator.measure_attention(worker_of(object()))


def test_layers_with_a_window_are_not_measured(folder) -> None:
    builder = Bench(make_config(folder), per_layer_sliding_window=64).builder
    assert builder.layers
    with pytest.raises(ValueError, match="sees all keys"):
        cuda.Calibrator.measure_attention(worker_of(builder))


def test_relay_that_fails_is_not_measured(bench, monkeypatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(cuda_impl, "paged_relay", fail)
    with pytest.raises(RuntimeError, match="no kernel image"):
        cuda.measure(bench.builder, bench.layers[0])
