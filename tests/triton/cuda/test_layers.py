"""Layers and engines on the CUDA backend: which are relayed, how they score, and the self-test."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from tests import reference_flash
from tests.triton.cuda.cuda_bench import HEADS, Bench, Step, make_config, random_step
from tests.triton.cuda.cuda_cases import SHARED, check, install, owned, relayed
from vllm_relay import metrics
from vllm_relay.backend import cuda_support, self_test
from vllm_relay.ops.planning import device_plan


def _swapped_heads(**kwargs):
    """The LSE layout of vllm-project/flash-attention#87: heads of a group and tokens changed."""
    out, lse = reference_flash.flash_attn_varlen_func(**kwargs)
    heads, tokens = lse.shape
    return out, lse.reshape(2, heads // 2, tokens).transpose(1, 2).reshape(heads, tokens)


def _log2(**kwargs):
    out, lse = reference_flash.flash_attn_varlen_func(**kwargs)
    return out, lse * 1.4427


def _crash(**kwargs):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("broken", [_swapped_heads, _log2, _crash])
def test_kernels_that_fail_their_self_test_leave_the_layer_to_vllm(
    folder, monkeypatch, caplog, broken
) -> None:
    config = make_config(folder)  # vLLM sets up its logging with the first
    caplog.set_level(logging.WARNING, "vllm.relay")
    monkeypatch.setattr(metrics.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    self_test.run.cache_clear()
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", broken)
    bench = Bench(config)
    self_test.run.cache_clear()
    monkeypatch.setattr(
        flash_attn, "flash_attn_varlen_func", reference_flash.flash_attn_varlen_func
    )
    assert "self-test" in bench.layers[0].impl.refusal
    assert "self-test" in caplog.text and "serves these layers" in caplog.text
    metadata = bench.build(SHARED, capture=True)
    assert not relayed(metadata)
    check(bench, SHARED, metadata)


def test_rows_without_keys_fail_the_self_test_on_flash_attention_2(folder, monkeypatch) -> None:
    update = device_plan.DevicePlan.update

    def without(*args, **kwargs):
        plan = update(*args, **kwargs)
        starts = plan.context.query_start_loc
        plan.context.seq_lens[starts[1:] == starts[:-1]] = 0
        return plan

    monkeypatch.setattr(device_plan.DevicePlan, "update", without)
    refusals = {}
    for version in (2, 3):
        install(monkeypatch, version)
        self_test.run.cache_clear()
        refusals[version] = Bench(make_config(folder)).layers[0].impl.refusal
    self_test.run.cache_clear()
    assert "self-test" in refusals[2] and refusals[3] is None


def test_layers_that_the_split_does_not_cover(folder) -> None:
    bench = Bench(make_config(folder), alibi_slopes=[0.1] * HEADS)
    assert bench.layers[0].impl.refusal == "ALiBi"
    assert type(bench.build(SHARED, capture=True)) is FlashAttentionMetadata


@pytest.mark.parametrize("attention", [{"logits_soft_cap": 5.0}, {"sinks": torch.ones(HEADS)}])
def test_layers_with_other_scores_are_covered(folder, monkeypatch, attention) -> None:
    bench = Bench(make_config(folder), **attention)
    metadata = bench.build(SHARED, capture=True)
    assert relayed(metadata)
    check(bench, SHARED, metadata)
    # Left out of the calls, they are missed.
    impl = bench.layers[0].impl
    monkeypatch.setattr(impl, "logits_soft_cap", 0.0)
    monkeypatch.setattr(impl, "sinks", None)
    got = bench.forward(metadata, bench.queries(owned(SHARED)))
    want = bench.stock(SHARED, bench.queries(owned(SHARED)), layer=1)
    assert (got - want).abs().max() > 1e-3


@pytest.mark.parametrize("version", [2, 3])
def test_rows_inside_of_their_window_are_covered(folder, monkeypatch, version) -> None:
    install(monkeypatch, version)
    bench = Bench(make_config(folder), per_layer_sliding_window=100)
    rng, shared, beyond = np.random.default_rng(9), 0, 0
    for _ in range(4):
        step = random_step(rng)
        metadata = bench.build(step, capture=True)
        assert relayed(metadata)
        shared += bench.builder.device_plan.newest()[0].groups
        beyond += sum(length > 100 for _, length, _ in step.rows)
        check(bench, step, metadata)
    assert shared > 1 and beyond > 3
    # Longer rows that shared all the same would see what is outside of their window.
    longer = Step([([*range(5, 12), 70], 118, 1), ([*range(5, 12), 71], 120, 1)])
    check(bench, longer, bench.build(longer, capture=True))
    bench.builder.device_plan.window = 0
    got = bench.forward(bench.build(longer, capture=True), bench.queries(2))
    assert (got - bench.stock(longer, bench.queries(2))).abs().max() > 1e-2


def test_a_window_that_saves_too_little_is_left_alone(folder) -> None:
    # 12 rows save at most 11 times the window.
    for least, active in ((1100, True), (1101, False)):
        bench = Bench(make_config(folder, min_saved_tokens=least), per_layer_sliding_window=100)
        assert bench.builder._active == active
    assert any("a window of 100 tokens saves too little" in said for said in metrics._said)


def test_a_group_with_another_window_than_its_layers_is_left_alone(folder) -> None:
    builder = Bench(make_config(folder), per_layer_sliding_window=100).builder
    for window, fits in ((100, True), (32, False), (None, False)):
        builder.kv_cache_spec = replace(builder.kv_cache_spec, sliding_window=window)
        refusal = cuda_support.engine_refusal(builder, builder.vllm_config)
        said = f"a window of {window or 'all'} over layers of another"
        assert refusal == (None if fits else said)


@pytest.mark.parametrize("settings", [{}, {"dense": True}], ids=str)
def test_an_fp8_cache_is_covered(folder, monkeypatch, settings) -> None:
    config = make_config(folder, **settings)
    config.cache_config.cache_dtype = "fp8"
    bench = Bench(config)
    rng, shared = np.random.default_rng(8), 0
    for _ in range(3):
        step = random_step(rng)
        metadata = bench.build(step, capture=True)
        assert relayed(metadata)
        shared += bench.builder.device_plan.newest()[0].groups
        check(bench, step, metadata)
    assert shared > 2
    # Another scale of the keys is seen.
    want = bench.stock(step, bench.queries(owned(step)))
    bench.layers[0]._k_scale.fill_(0.5)
    got = bench.forward(metadata, bench.queries(owned(step)))
    assert (got - want).abs().max() > 1e-2


def test_an_fp8_cache_of_another_flash_attention_is_left_alone(folder, monkeypatch) -> None:
    install(monkeypatch, version=4)
    config = make_config(folder)
    config.cache_config.cache_dtype = "fp8"
    assert Bench(config).layers[0].impl.refusal == "a fp8 KV cache"


def test_sinks_that_every_call_counts_fail_the_self_test(folder, monkeypatch) -> None:
    def twice(**kwargs):
        sinks = torch.zeros(HEADS) if kwargs["s_aux"] is None else kwargs["s_aux"]
        return reference_flash.flash_attn_varlen_func(**{**kwargs, "s_aux": sinks})

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", twice)
    self_test.run.cache_clear()
    refusal = Bench(make_config(folder), sinks=torch.ones(HEADS)).layers[0].impl.refusal
    self_test.run.cache_clear()
    assert "self-test" in refusal


def _draft_model(config) -> None:
    config.speculative_config = SimpleNamespace(method="eagle", num_speculative_tokens=2)


def _two_batches(config) -> None:
    config.parallel_config.enable_dbo = True


def _off(config) -> None:
    config.additional_config["relay"]["enabled"] = False


def _fast_prefill(config) -> None:
    config.cache_config.kv_sharing_fast_prefill = True


@pytest.mark.parametrize("change", [_draft_model, _two_batches, _off, _fast_prefill])
def test_engines_that_relay_leaves_alone(folder, change) -> None:
    config = make_config(folder)
    change(config)
    bench = Bench(config)
    assert type(bench.build(SHARED, capture=True)) is FlashAttentionMetadata
    assert any("not used" in line for line in metrics._said)


def test_flash_attention_2_is_left_alone_unless_asked_for(folder, monkeypatch) -> None:
    install(monkeypatch, version=2)
    for least, asked in ((None, False), (0, True)):
        bench = Bench(make_config(folder, min_saved_tokens=least))
        assert relayed(bench.build(SHARED, capture=True)) == asked
        assert any("FlashAttention 2" in line for line in metrics._said) == (not asked)
        monkeypatch.setattr(metrics, "_said", set())


def test_batch_invariance_is_left_alone(folder, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    bench = Bench(make_config(folder))
    assert type(bench.build(SHARED, capture=True)) is FlashAttentionMetadata
