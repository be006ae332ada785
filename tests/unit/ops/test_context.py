"""context_attention against the float64 oracle. All unowned cache slots hold NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ops import inputs
from tests.unit.ops.test_system import check as check_system
from tests.unit.ops.test_system import qkv, skip_unless_usable
from vllm_relay.ops import context_attention, providers, reference, system_attention
from vllm_relay.ops.attention import torch as plain

LAYOUTS = ["tokens", "heads", "turned", "packed"]


MIXED = [
    ([40, 3, 19], [7, 3, 1]),
    ([0, 5, 0], [1, 1, 4]),
    ([2, 30], [5, 0]),  # the first three queries of row 0 see nothing
    ([150], [150]),  # more queries than one chunk
    ([200, 90], [70, 130]),
]


def check(step, attend=context_attention):
    exact, exact_lse = reference.context_attention(*step.args())
    out, lse = attend(*step.args())
    rows = []
    for r in range(len(step.context_lens)):
        q, k, v = step.row(r)
        seeing = min(q.shape[0], k.shape[0])
        stock = torch.zeros_like(q)
        if seeing:
            stock[-seeing:] = inputs.stock(q[-seeing:], k, v, causal=True)
        rows.append(stock)
    inputs.assert_as_good(out, torch.cat(rows), exact)
    inputs.assert_lse(lse, exact_lse, step.q.dtype)


def like_here(x, device):
    """A copy of `x` with its strides, which `x.to` does not keep for a slice."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("provider", [None, "flash-attn", "triton", "torch"])
def test_providers_on_a_gpu(provider, layout, dtype):
    def attend(*args):
        args = [like_here(x, "cuda") for x in args]
        with providers.use("context", provider):
            skip_unless_usable("context", *args[:3])
            out, lse = context_attention(*args)
        return out.cpu(), lse.cpu()

    # 256 is what the package flash-attn takes.
    for block_size in (256,) if provider == "flash-attn" else (16, 256):
        for lens in ([1, 16, 17, 45], [33, 0, 1250, 7]):
            for queries in ([1] * 4, [2, 1, 5, 1], [3] * 4):
                step = inputs.paged(
                    lens, queries, layout=layout, dtype=dtype, block_size=block_size
                )
                check(step, attend)


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("head_size", inputs.HEAD_SIZES)
@pytest.mark.parametrize("heads", inputs.HEADS, ids=["mha", "gqa", "mqa"])
def test_decode(heads, head_size, dtype):
    check(inputs.paged([1, 16, 17, 45], [1] * 4, heads=heads, head_size=head_size, dtype=dtype))


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    check(inputs.paged([33, 0, 50, 7], [2, 1, 5, 1], layout=layout, dtype=dtype, block_size=32))


@pytest.mark.parametrize(("context_lens", "query_lens"), [*MIXED, ([0], [0]), ([], [])], ids=str)
@pytest.mark.parametrize("layout", ["tokens", "turned"])
def test_mixed_rows(context_lens, query_lens, layout):
    step = inputs.paged(context_lens, query_lens, heads=(2, 1), head_size=32, layout=layout)
    if not context_lens:
        out, lse = context_attention(*step.args())
        assert out.shape == (0, 2, 32)
        assert lse.shape == (2, 0)
        return
    check(step)


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_torch_provider(layout, dtype):
    with providers.use("context", "torch"):
        check(inputs.paged([33, 0, 50, 7], [2, 1, 5, 1], layout=layout, dtype=dtype))
        for context_lens, query_lens in MIXED:
            check(inputs.paged(context_lens, query_lens, dtype=dtype))


def test_a_long_prefill_is_attended_in_chunks_of_queries(monkeypatch):
    held = []
    stock = torch.logsumexp
    monkeypatch.setattr(plain, "_MOST_SCORES", 3 * 6 * 100)

    def attend(op, *args):
        def logsumexp(scores, dim):
            held.append(scores.numel())
            return stock(scores, dim)

        with providers.use(op.__name__.split("_")[0], "torch"), monkeypatch.context() as patch:
            patch.setattr(torch, "logsumexp", logsumexp)
            return op(*args)

    step = inputs.paged([40, 100, 3, 16], [30, 70, 2, 1])
    check(step, lambda *args: attend(context_attention, *args))
    assert max(held) == 3 * 6 * 100
    held.clear()
    check_system(*qkv(37, 100), lambda *args: attend(system_attention, *args))
    assert max(held) == 3 * 6 * 100


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=5),
    st.sampled_from([1, 3, 16]),
    st.sampled_from(LAYOUTS),
)
def test_any_lengths(rows, block_size, layout):
    context_lens, query_lens = (list(x) for x in zip(*rows, strict=True))
    check(
        inputs.paged(
            context_lens,
            query_lens,
            heads=(2, 1),
            head_size=16,
            block_size=block_size,
            layout=layout,
        )
    )


def test_scale():
    step = inputs.paged([20, 33], [1, 2])
    exact, exact_lse = reference.context_attention(*step.args(), scale=0.31)
    out, lse = context_attention(*step.args(), scale=0.31)
    step.q = step.q * (0.31 * 8)
    inputs.assert_as_good(out, context_attention(*step.args())[0], exact)
    inputs.assert_lse(lse, exact_lse, step.q.dtype)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD = {
    "q rank": ("q", "q", lambda x: x[0]),
    "k_cache rank": ("k_cache", "k_cache", lambda x: x[0]),
    "k_cache dtype": ("k_cache", "k_cache", lambda x: x.half()),
    "k_cache heads": ("k_cache", "k_cache", lambda x: x.repeat(1, 1, 2, 1)),
    "k_cache block size": (
        "v_cache",
        "k_cache",
        lambda x: x[:, :8],
    ),
    "v_cache shape": ("v_cache", "v_cache", lambda x: x[1:]),
    "block_table rank": ("block_table", "block_table", lambda x: x[0]),
    "block_table dtype": ("block_table", "block_table", lambda x: x.float()),
    "block_table device": ("block_table", "block_table", lambda x: x.to("meta")),
    "block_table negative id": ("block_table", "block_table", lambda x: x - 1000),
    "block_table large id": ("block_table", "block_table", lambda x: x + 1000),
    "block_table too narrow": ("context_lens", "block_table", lambda x: x[:, :1]),
    "context_lens rows": ("context_lens", "context_lens", lambda x: x[:1]),
    "context_lens dtype": ("context_lens", "context_lens", lambda x: x.float()),
    "context_lens negative": ("context_lens", "context_lens", lambda _: i32(20, -1)),
    "context_lens large": ("context_lens", "context_lens", lambda _: i32(20, 900)),
    "query_start_loc rows": ("query_start_loc", "query_start_loc", lambda x: x[:2]),
    "query_start_loc first": ("query_start_loc", "query_start_loc", lambda _: i32(1, 2, 3)),
    "query_start_loc falls": ("query_start_loc", "query_start_loc", lambda _: i32(0, 4, 3)),
    "query_start_loc short": ("query_start_loc", "query_start_loc", lambda _: i32(0, 1, 2)),
    "query_start_loc long": ("query_start_loc", "query_start_loc", lambda _: i32(0, 1, 4)),
}


@pytest.mark.parametrize(("name", "field", "spoil"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(name, field, spoil, monkeypatch):
    # Found before any provider is called: a kernel would read out of bounds.
    def called(*_):
        raise AssertionError("called")

    monkeypatch.setattr(providers, "choose", called)
    step = inputs.paged([20, 33], [1, 2])
    setattr(step, field, spoil(getattr(step, field)))
    with pytest.raises(ValueError, match=rf"^{name}: "):
        context_attention(*step.args())
