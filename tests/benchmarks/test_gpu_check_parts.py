"""The parts of gpu_check without a GPU: inputs, rooflines, and what passes and what does not."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import engine, flash_check, models, op, parity, systems
from benchmarks.gpu.batches import BLOCK, agrees, forest_tables, shared_batch
from benchmarks.gpu.journal import Wrong
from benchmarks.gpu.timing import Ceilings, DecodeStep
from tests.reference_flash import flash_attn_varlen_func as reference_varlen
from tests.unit.sharing.forests import find_forest
from vllm_relay.ops import reference

# 4 TB/s of reads, 800 TFLOP/s
CEILINGS = Ceilings(copy=3.9e12, read=4e12, matmul=8e14)


def test_the_roofline_of_a_step_is_its_least_bytes_or_its_flops() -> None:
    many = DecodeStep(64, 8192, 512)
    assert many.bytes == (2 * 8 * (8192 + 64 * 512) + 2 * 64 * 32) * 128 * 2
    assert many.flops == 2 * 2 * 64 * 32 * 128 * (8192 + 512)
    # 168.8 MB at 4 TB/s are 42.2 us; 9.1 GFLOP at 800 TFLOP/s are 11.4 us
    assert many.roofline_us(CEILINGS) == pytest.approx(42.2, abs=0.05)
    wide = DecodeStep(256, 65536, 16, kv_heads=1)
    assert wide.roofline_us(CEILINGS) == pytest.approx(wide.flops / 8e14 * 1e6)


@pytest.mark.parametrize(("model", "billions"), [("llama-3-8b", 7.505), ("llama-2-7b", 6.607)])
def test_the_roofline_of_an_engine_reads_all_weights_once(model: str, billions: float) -> None:
    case = engine.make_case(1, 0, 32000)
    seconds = 1 / models.roofline_tok_s(model, case, CEILINGS)
    # all parameters but the embeddings, of which a step reads one row; KV of some 350 tokens
    assert seconds * 4e12 == pytest.approx(2 * billions * 1e9, rel=0.02)


def test_shared_batches_share_their_prefix_and_nothing_else() -> None:
    shape = DecodeStep(5, 48, 20, query_heads=4, kv_heads=2, head_size=32)
    batch = shared_batch(shape, "cpu")
    table = batch.block_table
    assert (table[:, :3] == table[0, :3]).all() and (table > 0).all()
    assert table[:, 3:].unique().numel() == 5 * 2 and batch.longest == 80
    args = (batch.q, batch.k_cache, batch.v_cache, table, batch.seq_lens, batch.query_start_loc)
    exact, _ = reference.context_attention(*args)
    for found in (op.exact_shared(batch, shape), batch.exact()[0]):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("groups", [0, 1, 4])
def test_forest_tables_say_what_a_plan_must_find(groups: int) -> None:
    tables = forest_tables(40, 12, groups, "cpu")
    table, lens = tables.block_table.numpy(), tables.seq_lens.numpy()
    forest = find_forest(table, np.maximum(lens - 1, 0), BLOCK)
    found = [group for level in forest.levels for group in level]
    saved = sum((len(g.rows) - 1) * g.segment.blocks * BLOCK for g in found)
    assert (len(found), saved) == (tables.groups, tables.saved)
    assert table.max() < tables.blocks and (groups == 0) == (saved == 0)


def test_flashinfer_is_told_the_same_pages() -> None:
    shape = DecodeStep(3, 32, 21)
    table = shared_batch(shape, "cpu").block_table
    queries, pages, ids, last = systems.cascade_pages(table, shape)
    assert [x.tolist() for x in queries] == [[0, 3], [0, 1, 2, 3]]
    for row in range(3):
        first, own = (i[p[r] : p[r + 1]] for i, p, r in zip(ids, pages, (0, row), strict=True))
        assert torch.equal(torch.cat([first, own]), table[row])
        held = [BLOCK * (len(first) - 1) + last[0][0], BLOCK * (len(own) - 1) + last[1][row]]
        assert [int(x) for x in held] == [32, 21]


def test_agreement_is_held_against_the_stock_kernel() -> None:
    exact = torch.randn(64, 8, 32, dtype=torch.float64)
    stock = exact.bfloat16()
    assert agrees(stock, stock, exact)
    assert not agrees((exact * 1.01).bfloat16(), stock, exact)
    assert not agrees(stock, (exact * 1.05).bfloat16(), exact)
    hole = stock.clone()
    hole[3, 2, 1] = float("nan")
    assert not agrees(hole, stock, exact)


def test_partials_of_flash_attention_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(varlen: Any) -> dict[str, Any]:
        monkeypatch.setattr(flash_check, "flash_attention", lambda version: varlen)
        return flash_check.varlen(3, device="cpu")

    assert check(reference_varlen)["correct"] == "yes"

    def wrong(change: Any, **kwargs: Any) -> Any:
        out, lse = reference_varlen(**kwargs)
        return change(out, lse)

    changes = {
        "lse is": lambda out, lse: (out, lse.T.contiguous()),
        "infinite elsewhere": lambda out, lse: (out, lse.nan_to_num(neginf=0.0)),
        "largest of lse": lambda out, lse: (out, lse + 0.1),
        "rms error of out": lambda out, lse: (out.mul_(1.02), lse),
        # grouped heads in another order, as FA2 once had them
        "largest of lse [1-9]": lambda out, lse: (
            out,
            lse.unflatten(0, (8, 4)).transpose(0, 1).flatten(0, 1),
        ),
    }
    for message, change in changes.items():
        with pytest.raises(Wrong, match=message):
            check(partial(wrong, change))


def test_restated_constants_are_those_of_the_backend() -> None:
    from vllm_relay.backend import cuda_history

    assert systems.PROBE_STEPS == cuda_history.PROBE_STEPS
    assert systems.HEARD_AFTER == cuda_history.HEARD_AFTER


def test_windows_begin_when_relay_has_begun_and_end_before_the_requests_do() -> None:
    case = engine.make_case(64, 8192, 100)
    assert case["settle"] >= systems.PROBE_STEPS + systems.HEARD_AFTER + 2
    assert case["limit"] >= case["settle"] + case["windows"] * case["steps"] + 64


def test_mixes_have_their_groups_and_loners() -> None:
    case = parity.make_case(32, 3, 8)
    starts = [tuple(p[:64]) for p in case["prompts"]]
    counts = [starts.count(tuple(prefix[:64])) for prefix in case["warm_up"]]
    assert len(case["prompts"]) == len(case["force"]) == 32 and len(counts) == 3
    assert min(counts) >= 2 and sum(counts) == 26
    assert max(map(len, case["prompts"])) + parity.STEPS < 2048
