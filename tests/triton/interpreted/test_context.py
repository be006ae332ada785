"""The Triton context attention under the interpreter."""

import pytest
import torch

from tests.unit.ops import inputs
from tests.unit.ops.test_context import LAYOUTS, MIXED, check
from vllm_relay.ops import providers
from vllm_relay.ops.attention import triton as attention
from vllm_relay.ops.attention.providers import PagedContext


def attend(q, k_cache, v_cache, block_table, context_lens, query_start_loc, most=None):
    queries, keys = most or (int(query_start_loc.diff().max()), int(context_lens.max()))
    context = PagedContext(
        block_table=block_table,
        context_lens=context_lens,
        query_start_loc=query_start_loc,
        max_query_len=queries,
        max_context_len=keys,
    )
    return attention.context_attention(q, k_cache, v_cache, context, q.shape[-1] ** -0.5)


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 256])
@pytest.mark.parametrize("heads", inputs.HEADS, ids=["mha", "gqa", "mqa"])
def test_decode(heads, head_size, dtype):
    step = inputs.paged([1, 16, 17, 45], [1] * 4, heads=heads, head_size=head_size, dtype=dtype)
    check(step, attend)


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("splits", [1, 3])
def test_layouts(layout, dtype, splits, monkeypatch):
    monkeypatch.setattr(attention, "_num_splits", lambda *_: splits)
    check(
        inputs.paged([33, 0, 150, 7], [2, 1, 5, 1], layout=layout, dtype=dtype, block_size=32),
        attend,
    )


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(("context_lens", "query_lens"), MIXED, ids=str)
def test_mixed_rows(context_lens, query_lens, splits, monkeypatch):
    monkeypatch.setattr(attention, "_num_splits", lambda *_: splits)
    check(inputs.paged(context_lens, query_lens, heads=(2, 1), head_size=32), attend)


@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
def test_block_sizes(block_size):
    # Neither the blocks nor the lengths are multiples of the keys read at once.
    check(inputs.paged([130, 65, 64], [3, 1, 2], block_size=block_size), attend)


def test_one_block_per_row():
    # As relay_attention passes a row's own tokens.
    step = inputs.paged([90, 100, 0], [3, 1, 2], block_size=100)
    step.block_table = step.block_table[:, :1]
    check(step, attend)


def test_lengths_are_upper_bounds():
    # A captured graph is replayed with shorter rows than it was launched for.
    step = inputs.paged([33, 0, 50], [2, 0, 3])
    check(step, lambda *args: attend(*args, most=(64, 4096)))


def test_padded_rows_and_tokens_read_nothing():
    # As vLLM pads a graph: rows of length 0 without queries, tokens of no row, stale columns.
    step = inputs.paged([20, 40], [1, 1], heads=(2, 1))
    table = torch.cat([step.block_table, torch.full((2, step.block_table.shape[1]), 1 << 30)])
    lens = torch.tensor([20, 40, 0, 0], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    q = torch.cat([step.q, torch.full_like(step.q, inputs.NAN)])
    want, want_lse = attend(*step.args())
    out, lse = attend(q, step.k_cache, step.v_cache, table.int(), lens, starts)
    assert torch.equal(out[:2], want)
    assert torch.equal(lse[:, :2], want_lse)
    assert not out[2:].any()
    assert lse[:, 2:].isneginf().all()


def test_the_op_can_be_made_to_use_it():
    with providers.use("context", "triton"):
        check(inputs.paged([40, 3, 19], [7, 3, 1]))
        check(inputs.paged([0, 5, 0], [1, 1, 4], dtype=torch.float16))
