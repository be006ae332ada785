"""gpu_check's cases with relay's Triton kernels: right plans pass, planted errors do not."""

import pytest
import torch

from benchmarks.gpu import flash, systems
from benchmarks.gpu.batches import BLOCK, agrees, errors, shared_batch
from benchmarks.gpu.journal import Wrong
from benchmarks.gpu.kernels import check_plan, forest_batch
from benchmarks.gpu.op import exact_shared
from benchmarks.gpu.timing import DecodeStep
from tests.reference_flash import flash_attn_varlen_func as reference_varlen
from tests.reference_flash import get_scheduler_metadata
from vllm_relay.ops.planning.device_plan import DevicePlan


def made_for(batch):
    rows, blocks = batch.block_table.shape
    return DevicePlan(
        max_rows=rows, max_tokens=rows, max_blocks=blocks, block_size=BLOCK, device="cpu"
    )


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_the_plan_of_a_forest_is_found_right(groups):
    batch, tables = forest_batch(12, 9, groups, (4, 2, 32), "cpu")
    row = check_plan(made_for(batch), batch, tables, reference_varlen)
    assert row["correct"] == "yes" and row["groups"] == groups


def test_a_plan_that_misses_a_group_is_wrong():
    batch, tables = forest_batch(12, 9, 3, (4, 2, 32), "cpu")
    batch.block_table[:, 0] = torch.arange(1, 13)
    with pytest.raises(Wrong, match="expected 3 groups"):
        check_plan(made_for(batch), batch, tables, reference_varlen)


def test_relay_attention_over_a_wrong_lse_is_wrong():
    batch, tables = forest_batch(12, 9, 3, (4, 2, 32), "cpu")

    def off(*, causal, return_softmax_lse=False, **kwargs):
        found = reference_varlen(causal=causal, return_softmax_lse=return_softmax_lse, **kwargs)
        return (found[0], found[1] + (0 if causal else 0.1)) if return_softmax_lse else found

    with pytest.raises(Wrong, match="relay attention"):
        check_plan(made_for(batch), batch, tables, off)


NAMES = ["stock", "stock-graphs", "relay", "relay-layer", "relay-free", "relay-dense"]
# system -> splits of its calls: of segments, of contexts or whole rows
SPLITS = {"stock": {0}, "stock-graphs": {32}, "relay-free": {0}}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_measured_is_right_and_split_as_in_the_backend(monkeypatch, name):
    calls, splits, scheduled = [], set(), []

    def varlen(**kwargs):
        calls.append("cu_seqlens_k" in kwargs)
        told = kwargs.get("num_splits", 0)
        splits.add((kwargs["causal"], told))
        # Of the very call it is given to: the reference compares.
        schedule = kwargs.get("scheduler_metadata")
        assert (schedule is None) == (told == 0 or "cu_seqlens_k" in kwargs)
        return reference_varlen(fa_version=3, **kwargs)

    def schedule(**kwargs):
        scheduled.append(kwargs["num_splits"])
        return get_scheduler_metadata(**kwargs)

    monkeypatch.setattr(flash, "scheduler", lambda: schedule)
    monkeypatch.setattr(systems, "flash_attention", lambda version: varlen)
    monkeypatch.setattr(systems, "MIN_SAVED_TOKENS", 0)
    monkeypatch.setattr(systems, "system_splits", lambda *args: 16)
    shape = DecodeStep(4, 48, 20, query_heads=4, kv_heads=2, head_size=32)
    batch = shared_batch(shape, "cpu")
    ready, groups = systems.SYSTEMS[name][0](batch, shape)
    before = len(scheduled)
    if name in ("relay", "relay-free"):  # the timed work has to plan the tables as they are now
        batch.block_table[:, 3:] = batch.block_table[:, 3:].roll(1, 0)
    out = torch.full_like(batch.q, float("nan"))
    ready(out)
    exact = exact_shared(batch, shape)
    assert groups == (None if name.startswith("stock") else 1)
    assert {told for _, told in splits} == SPLITS.get(name, {16, 32})
    assert ((False, 16) in splits and (True, 32) in splits) == (name not in SPLITS)
    # Timed with the work where the plan is.
    assert scheduled[before:] == ([16, 32] if name == "relay" else [])
    assert any(calls) == (name == "relay-dense")
    assert agrees(out, exact.bfloat16(), exact), errors(out, exact)
