"""The engines of gpu_check: their processes, what is patched in them, and real ones on the CPU."""

import csv
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import engine, engine_patches, engine_runner, parity
from benchmarks.gpu.engine_runner import EngineFailed, record, rows_of
from benchmarks.gpu.journal import Clock, Journal
from benchmarks.gpu.timing import Ceilings
from benchmarks.harness.random_model import VOCABULARY, write_random_model

CPU_PLANT = "tests.benchmarks.test_gpu_check_engines:plant_wrong_lse_on_cpu"


def journal_in(folder: Path, *columns: str) -> Journal:
    return Journal(folder / "part.csv", columns, {"device": "none"})


def rows_in(folder: Path) -> list[dict[str, str]]:
    with (folder / "part.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def later() -> Clock:
    return Clock(time.time() + 600)


def test_an_engine_that_fails_costs_one_row(tmp_path: Path, capfd: Any) -> None:
    cases = [{"name": "first"}, {"name": "second"}]
    spec = {"job": "no such job", "cases": cases}
    rows = rows_of(spec, tmp_path, "relay", later(), {})
    left_out = record(rows, cases, "v2", journal_in(tmp_path), lambda *_: {}, lambda *_: {})
    (row,) = rows_in(tmp_path)
    assert (row["case"], row["status"]) == ("v2: first", "FAIL")
    assert "KeyError: 'no such job'" in row["failure"] and left_out == ["v2: second"]
    assert "the end of the log of relay" in capfd.readouterr().out


def test_an_engine_whose_time_is_up_is_ended(tmp_path: Path) -> None:
    clock = Clock(time.time() - engine_runner.GRACE - 1)
    spec = {"job": "reference", "cases": [], "engine": {"model": "none"}}
    with pytest.raises(EngineFailed, match="its time was up"):
        list(rows_of(spec, tmp_path, "relay", clock, {}))


def test_rows_of_an_engine_are_written_as_they_come(tmp_path: Path) -> None:
    cases = [{"name": name} for name in ("good", "bad", "late")]

    def rows() -> Any:
        yield {"name": "good"}
        assert [row["case"] for row in rows_in(tmp_path)] == ["t: good"]
        yield {"name": "bad", "error": "ValueError: x"}
        yield {"name": "late", "left_out": True}

    shared, judged = (lambda case, row: {"a": 1}), (lambda case, row: {"b": 2})
    left_out = record(rows(), cases, "t", journal_in(tmp_path, "a", "b"), shared, judged)
    found = [(row["status"], row["a"], row["b"]) for row in rows_in(tmp_path)]
    assert (found, left_out) == ([("pass", "1", "2"), ("FAIL", "1", "")], ["t: late"])


@dataclass
class Params:
    extra_args: dict[str, Any] | None = None


@dataclass
class Sampler26:
    """Signatures of runner V2's sampler in vLLM 0.26; samples token 7."""

    added: list[int] = field(default_factory=list)

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.added.append(req_idx)

    def sample(
        self,
        logits: Any,
        expanded_idx_mapping: Any,
        idx_mapping_np: Any,
        pos: Any,
        input_ids: Any,
        expanded_local_pos: Any,
        return_logprobs: bool = False,
    ) -> Any:
        return torch.full((len(logits),), 7), logits


class Sampler33(Sampler26):
    """As vLLM 0.33 has them."""

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        self.added.append(req_idx)

    def sample(
        self,
        logits: Any,
        expanded_idx_mapping: Any,
        idx_mapping: Any,
        idx_mapping_np: Any,
        pos: Any,
        input_ids: Any,
        expanded_local_pos: Any,
        seq_lens_upper_bound_np: Any,
        return_logprobs: bool = False,
    ) -> Any:
        return torch.full((len(logits),), 7), logits


@pytest.mark.parametrize("sampler_class", [Sampler26, Sampler33])
def test_runner_v2_produces_the_forced_tokens(
    monkeypatch: pytest.MonkeyPatch, sampler_class: Any
) -> None:
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    monkeypatch.setattr(Sampler, "add_request", sampler_class.add_request)
    monkeypatch.setattr(Sampler, "sample", sampler_class.sample)
    engine_patches.force_tokens_on_v2()
    sampler = Sampler.__new__(Sampler)
    sampler.added = []
    old = sampler_class is Sampler26

    def add(slot: int, tokens: int, forced: list[int] | None) -> None:
        extra = {"force": forced, "prompt_tokens": tokens} if forced else None
        sampler.add_request(slot, *([tokens] if old else []), Params(extra))

    def sampled(slots: list[int], positions: list[int]) -> list[int]:
        logits, pos = torch.zeros(len(slots), 9), torch.tensor(positions)
        mapping = [torch.tensor(slots)] * (1 if old else 2)
        rest = [pos, pos, pos] + ([] if old else [np.array(positions)])
        found, _ = sampler.sample(
            logits, *mapping, np.array(slots, np.int32), *rest, return_logprobs=True
        )
        return found.tolist()

    add(3, 10, [1, 2, 3])
    add(0, 4, [4, 5, 6])
    assert sampled([0, 3], [3, 9]) == [4, 1]
    assert sampled([3, 0], [11, 4]) == [3, 5]
    assert sampled([3], [5]) == [1]  # a chunk of the prompt; the runner drops its token
    add(3, 10, None)
    assert sampled([3], [9]) == [7]
    assert sampler.added == [3, 0, 3]


@dataclass
class Part:
    causal: bool


def test_the_planted_error_is_in_the_lse_of_segments_and_not_in_the_self_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_relay.backend import cuda_impl, self_test
    from vllm_relay.ops.step import paged

    def stock(q: Any, k: Any, v: Any, step: Any, attend: Any, **kwargs: Any) -> list[Any]:
        return [attend(part, q, k, v, kwargs["out"]) for part in step]

    real = paged.paged_relay
    assert cuda_impl.paged_relay is self_test.paged_relay is real
    monkeypatch.setattr(cuda_impl, "paged_relay", stock)
    engine_patches.plant_wrong_lse()
    assert self_test.paged_relay is paged.paged_relay is real
    step = [Part(causal=False), Part(causal=True)]
    found = cuda_impl.paged_relay(0, 0, 0, step, lambda *_: torch.ones(1), out=None, side=None)
    assert [float(lse) for lse in found] == pytest.approx([1.1, 1.0])


def test_full_graphs_are_counted_on_both_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import ForwardContext, override_forward_context
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    ran = []
    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", lambda self, desc: ran.append(desc))
    monkeypatch.setattr(CUDAGraphWrapper, "__call__", lambda self, x: ran.append(x))
    before = engine_patches.replays()
    engine_patches.count_replays()
    CudaGraphManager.__new__(CudaGraphManager).run_fullgraph("v2")
    modes = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    for own in modes:
        wrapper = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
        wrapper.runtime_mode = own
        wrapper("outside")
        for mode in (*modes, CUDAGraphMode.NONE):
            context = ForwardContext({}, {}, {}, cudagraph_runtime_mode=mode)
            with override_forward_context(context):
                wrapper(mode.name)
    assert engine_patches.replays() - before == 2 and len(ran) == 9


def plant_wrong_lse_on_cpu() -> None:
    """`engine_patches.plant_wrong_lse` for the CPU backend."""
    from tests.engine.in_worker import WorkerExtension

    WorkerExtension().plant("lse")


@pytest.mark.engine
@pytest.mark.slow
def test_engines_on_the_cpu_pass_and_a_planted_error_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "PLANT", CPU_PLANT)
    monkeypatch.setattr(parity, "BLOCK", 128)  # of a CPU engine
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = write_random_model(tmp_path / "model", 8, 2, 64)
    cases = [parity.make_case(15, 2, 8), parity.make_case(4, 0, 8)]
    runs = [
        parity.Run(system, runner="v1", graphs=False, dtype="float32", system_kv=files)
        for system, files in (
            ("stock", False), ("relay", False), ("planted", False), ("relay", True)
        )
    ]  # fmt: skip

    def on_cpu(run: parity.Run, model: Path, cases: list[dict[str, Any]]) -> dict[str, Any]:
        spec = parity.spec_of(run, model, cases, cuda=False)
        spec["engine"]["max_num_seqs"] = 16
        return spec

    # Ended after the first engine; the next run goes on with the others.
    journal = journal_in(tmp_path, *parity.COLUMNS)
    assert parity.run_all(runs[:1], cases, model, tmp_path, journal, later(), on_cpu) == []
    journal = journal_in(tmp_path, *parity.COLUMNS)
    assert parity.run_all(runs, cases, model, tmp_path, journal, later(), on_cpu) == []
    rows = rows_in(tmp_path)
    assert [row["failure"] for row in rows] == [""] * 8
    assert [row["correct"] for row in rows] == ["yes"] * 4 + ["planted error seen"] + ["yes"] * 3
    relayed = {(row["system"], row["groups"]): int(row["steps_relayed"]) for row in rows}
    assert relayed["stock", "2"] == relayed["relay", "0"] == 0 < relayed["relay", "2"]


@pytest.mark.engine
@pytest.mark.slow
def test_decode_is_timed_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "OWN", 16)
    monkeypatch.setattr(engine, "MIN_SAVED_TOKENS", 0)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = write_random_model(tmp_path / "model", 4, 2, 64)
    cases = [engine.make_case(b, p, VOCABULARY, 2, 4) for b, p in ((4, 256), (3, 0))]
    # fp32: greedy answers of two paths then part at no near-tie
    settings = (("enforce_eager", True), ("additional_config", {"relay": {"min_saved_tokens": 0}}))
    settings += (("dtype", "float32"),)
    systems = [
        engine.EngineSetup(name, backend, "v1", settings, graphs=False)
        for name, backend in (("stock", "CPU_ATTN"), ("relay", "RELAY"))
    ]

    def run() -> list[str]:
        return engine.run_model(
            "llama-3-8b",
            model,
            systems,
            cases,
            Ceilings(1e12, 1e12, 1e15),
            tmp_path,
            journal_in(tmp_path, *engine.COLUMNS),
            later(),
            cuda=False,
        )

    left_out = run()
    rows = rows_in(tmp_path)
    assert run() == [] and rows_in(tmp_path) == rows  # all is done
    assert left_out == [] and [row["failure"] for row in rows] == [""] * 4
    assert all(float(row["tok_s_min"]) <= float(row["tok_s"]) for row in rows)
    assert [int(row["steps_relayed"]) > engine.LAG for row in rows] == [False, False, True, False]
    assert {row["same_tokens_as_stock"] for row in rows[2:]} == {"1.0"}
