"""Engines with a draft model: the verification of drafts is relayed, the draft model is vLLM's."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from tests.triton.cuda.cuda_bench import Bench, Step, make_config, random_step
from tests.triton.cuda.cuda_cases import SHARED, check, owned, relayed
from tests.triton.cuda.test_graphs import Desc, capture_graphs
from tests.triton.cuda.test_graphs import manager as manager
from vllm_relay import compat, metrics
from vllm_relay.backend import cuda_impl
from vllm_relay.backend.cuda_graphs import graphs

DRAFTS = 2  # of a request and step


def load_on_runner_v2(config: Any, add_layer: Any) -> Any:
    """A runner after vLLM's own `load_model` of a draft model of one layer."""

    class Speculator(DraftModelSpeculator):
        def load_draft_model(self, *args: Any, **kwargs: Any) -> nn.Module:
            add_layer()
            return nn.Module()

    Speculator.__abstractmethods__ = frozenset()
    made = object.__new__(Speculator)
    vars(made).update(
        vllm_config=config, use_local_argmax_reduction=False, use_acceptance_estimator=False
    )
    made.load_model(nn.Module())
    return SimpleNamespace(speculator=made)


def load_on_runner_v1(config: Any, add_layer: Any) -> Any:
    class Proposer(SpecDecodeBaseProposer):
        def _get_model(self) -> nn.Module:
            add_layer()
            return nn.Module()

        def _share(self, *args: Any) -> None: ...

        _maybe_share_embeddings = _maybe_share_lm_head = _share

    made = object.__new__(Proposer)
    vars(made).update(vllm_config=config, supports_mm_inputs=False, parallel_drafting=False)
    made.load_model(nn.Module())
    return SimpleNamespace(drafter=made)


@pytest.fixture(params=[load_on_runner_v2, load_on_runner_v1], ids=["runner-v2", "runner-v1"])
def bench(folder, monkeypatch, request) -> Bench:
    """Two layers of the target model and, in the same KV cache group, one of the draft model."""
    config = make_config(folder)
    config.speculative_config = SimpleNamespace(method="eagle3", num_speculative_tokens=DRAFTS)

    def load(add_layer: Any) -> None:
        worker = SimpleNamespace(model_runner=request.param(config, add_layer))
        monkeypatch.setattr(compat, "_worker", lambda: worker)

    return Bench(config, load_drafts=load)


def test_verification_is_relayed_and_the_draft_model_is_left_alone(bench, monkeypatch) -> None:
    calls = []
    relay = cuda_impl.paged_relay
    monkeypatch.setattr(
        cuda_impl, "paged_relay", lambda *a, **kw: (calls.append(1), relay(*a, **kw))
    )
    rng, groups = np.random.default_rng(0), []
    captured = bench.build(Step([([1], 1 + DRAFTS, 1 + DRAFTS)] * 8, 8), capture=True)
    for i in range(8):
        step = random_step(rng, queries=(1 + DRAFTS, 1)[i % 2], padded=8)
        metadata = bench.build(step)
        groups.append(bench.builder.device_plan.newest()[0].groups)
        for layer, times in enumerate((1, 1, 0)):
            calls.clear()
            check(bench, step, metadata if i % 2 else captured, layer)
            assert len(calls) == times * relayed(metadata if i % 2 else captured)
    assert max(groups) > 1


def test_builders_of_a_draft_model_are_vllms(bench) -> None:
    """The draft model's own, for drafts after the first, and the target's, on runner V1."""
    builder = bench.make_builder(bench.layers[2:])
    stock = FlashAttentionMetadataBuilder(
        bench.spec, [bench.layers[2].layer_name], bench.config, torch.device("cpu")
    )
    name = "supports_draft_decode_metadata_update"
    assert getattr(builder, name, False) == getattr(stock, name, False)
    assert not getattr(bench.builder, name, False)
    assert builder not in graphs._builders.values()
    common = SHARED.common(bench.buffers)
    for made in (
        builder.build(0, common),
        builder.build_for_cudagraph_capture(common),
        bench.builder.build_for_drafting(common, 1),
    ):
        assert type(made) is FlashAttentionMetadata
    assert not any("not used" in line for line in metrics._said)


def test_graphs_of_a_draft_model_are_captured_once(manager, bench) -> None:
    """The first pass of a draft model is captured with the target model's builders."""
    capture_graphs(manager, bench)
    assert set(manager._relay_plain_graphs) == {Desc(8), Desc(4)} and graphs.have_both
    manager.graphs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "layers", bench.layers[::-1])  # the draft model's is the first
        replays = capture_graphs(manager, bench)
        assert not manager._relay_plain_graphs and set(manager.graphs) == {
            Desc(8),
            Desc(4),
            Desc(1),
        }
        step = Step(SHARED.rows, 8)
        bench.build(step)
        manager.run_fullgraph(Desc(8))
        want = bench.stock(step, bench.queries(8))
        torch.testing.assert_close(replays.pop()[2][: owned(step)], want[: owned(step)])


@pytest.mark.parametrize(
    ("runner", "answer"),
    [
        (SimpleNamespace(speculator=None), True),  # the first stages of a pipeline
        (SimpleNamespace(drafter=SimpleNamespace()), False),
        (None, False),
    ],
)
def test_where_vllm_does_not_name_the_layers(folder, monkeypatch, runner, answer) -> None:
    config = make_config(folder)
    config.speculative_config = SimpleNamespace(method="medusa", num_speculative_tokens=DRAFTS)
    worker = runner and SimpleNamespace(model_runner=runner)
    monkeypatch.setattr(compat, "_worker", lambda: worker)
    assert relayed(Bench(config).build(SHARED, capture=True)) == answer
    line = "a draft model whose layers vLLM does not name"
    assert any(line in said for said in metrics._said) != answer


def test_verification_of_changing_length_is_left_to_vllm(folder) -> None:
    config = make_config(folder)
    config.speculative_config = SimpleNamespace(
        method="ngram", num_speculative_tokens=DRAFTS, enable_adaptive_verification=True
    )
    assert not relayed(Bench(config).build(SHARED, capture=True))
    assert any("adaptive verification" in said for said in metrics._said)
