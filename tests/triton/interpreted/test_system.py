"""The Triton system attention under the interpreter."""

from itertools import pairwise

import pytest
import torch

from tests.unit.ops import inputs
from tests.unit.ops.test_system import check, qkv
from vllm_relay.ops import providers, reference, relay_attention, system_attention
from vllm_relay.ops.attention import triton as attention
from vllm_relay.ops.attention.providers import PagedContext


def attend(q, k, v, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attention.system_attention(q, k, v, scale)


def set_splits(monkeypatch, splits):
    monkeypatch.setattr(attention, "_num_splits", lambda *_: splits)


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("head_size", inputs.HEAD_SIZES)
@pytest.mark.parametrize("heads", inputs.HEADS, ids=["mha", "gqa", "mqa"])
def test_against_oracle(heads, head_size, dtype):
    check(*qkv(7, 133, heads, head_size, dtype), attend=attend)


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 517), (37, 1), (65, 31)])
@pytest.mark.parametrize("splits", [1, 4])
def test_odd_sizes_and_splits(tokens, keys, dtype, splits, monkeypatch):
    # Splits of 64 or 32 keys: with few keys, most of them attend to nothing.
    set_splits(monkeypatch, splits)
    check(*qkv(tokens, keys, dtype=dtype), attend=attend)


@pytest.mark.parametrize("heads", inputs.HEADS, ids=["mha", "gqa", "mqa"])
def test_any_strides(heads):
    q, k, v = qkv(5, 70, heads, head_size=80)
    q = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    k = k.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    v = torch.cat([v, v + 1], -1)[..., :80]
    check(q, k, v, attend=attend)
    check(q, v, k, attend=attend)


def test_large_scores_do_not_overflow(monkeypatch):
    set_splits(monkeypatch, 2)
    q, k, v = qkv(4, 50)
    check(q * 20, k * 20, v, attend=attend)


def test_a_nan_score_is_not_hidden():
    q, k, v = qkv(4, 50, dtype=torch.float32)
    k[3, 1] = inputs.NAN
    out, lse = attend(q, k, v)
    # Heads 3 to 5 read KV head 1.
    assert out[:, 3:].isnan().all()
    assert lse[3:].isnan().all()
    assert out[:, :3].isfinite().all()


def test_the_op_can_be_made_to_use_it():
    q, k, v = qkv(4, 50, dtype=torch.float16)
    with providers.use("system", "triton"):
        check(q, k, v)
        with pytest.raises(ValueError, match="interpreter multiplies bfloat16 wrongly"):
            system_attention(*qkv(4, 50))


def groups(cu_tokens, segment_lens, *, tokens, head_size=64, dtype=torch.float32, layout="tokens"):
    """Paged segments (see inputs.paged), with queries that belong to no group before and after."""
    counts = [b - a for a, b in pairwise(cu_tokens)]
    step = inputs.paged(segment_lens, counts, head_size=head_size, dtype=dtype, layout=layout)
    step.q = inputs.normal(tokens, 6, head_size, dtype=dtype, seed=9)
    # What lies in memory before the first group looks like one more.
    step.query_start_loc = torch.tensor([0, *cu_tokens], dtype=torch.int32)[1:]
    step.context_lens = torch.tensor([1, *segment_lens], dtype=torch.int32)[1:]
    step.block_table = torch.cat([step.block_table[:1], step.block_table])[1:]
    return step


def check_groups(step, max_tokens, max_len):
    q = step.q
    context = PagedContext(
        block_table=step.block_table,
        context_lens=step.context_lens,
        query_start_loc=step.query_start_loc,
        max_query_len=max_tokens,
        max_context_len=max_len,
    )
    caches = (step.k_cache, step.v_cache)
    out, lse = attention.paged_system_attention(q, *caches, context, q.shape[-1] ** -0.5)
    exact = torch.zeros(q.shape, dtype=torch.float64)
    exact_lse = torch.full((q.shape[1], q.shape[0]), -inputs.INF, dtype=torch.float64)
    stock = torch.zeros_like(q)
    for g, n in enumerate(step.context_lens.tolist()):
        part = slice(*step.query_start_loc[g : g + 2].tolist())
        queries, k, v = step.row(g)
        exact[part], exact_lse[:, part] = reference.attention_lse(queries, k, v)
        if n and queries.shape[0]:
            stock[part] = inputs.stock(queries, k, v)
    inputs.assert_as_good(out, stock, exact)
    inputs.assert_lse(lse, exact_lse, q.dtype)


GROUPS = {
    "one": ([0, 7], [100], 7),
    "two with a tail of no group": ([0, 5, 9], [33, 129], 12),
    "a head of no group": ([3, 9, 10], [64, 1], 10),
    "a long head of no group": ([20, 41, 44], [50, 20], 46),
    "empty groups": ([0, 0, 6, 6, 8, 8], [16, 40, 0, 0, 70], 8),
    "more tiles than one": ([0, 41, 44, 61], [50, 20, 90], 63),
    "no group with both": ([0, 0, 3], [20, 0], 4),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("cu_tokens", "lens", "tokens"), GROUPS.values(), ids=GROUPS.keys())
def test_groups(cu_tokens, lens, tokens, splits, monkeypatch):
    set_splits(monkeypatch, splits)
    check_groups(groups(cu_tokens, lens, tokens=tokens), 41, 512)


@pytest.mark.parametrize("layout", ["tokens", "heads", "turned", "packed"])
@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
def test_groups_in_any_layout(layout, dtype):
    step = groups([0, 50, 57], [70, 45], tokens=60, head_size=96, dtype=dtype, layout=layout)
    check_groups(step, 50, 70)


def test_a_level_of_relay_attention_is_one_launch(monkeypatch):
    # 6 rows of 2 queries; a level of 1 shared row, one of 3 with lengths of their own.
    q = inputs.normal(6, 2, 6, 64, seed=1)
    k, v = inputs.normal(6, 9, 2, 64, seed=2), inputs.normal(6, 9, 2, 64, seed=3)
    shared = [inputs.normal(n, s, 2, 64, seed=n) for n, s in ((1, 40), (3, 25))]
    lens = [None, torch.tensor([25, 0, 7], dtype=torch.int32)]

    def attend():
        return relay_attention(q, k, v, shared, shared, shared_seq_lens=lens)

    want = attend()
    calls = []
    stock = attention.paged_system_attention
    monkeypatch.setattr(
        attention, "paged_system_attention", lambda *args: calls.append(1) or stock(*args)
    )
    with providers.use("system", "triton"):
        got = attend()
    assert len(calls) == 1
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
