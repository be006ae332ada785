"""system_attention against the float64 oracle."""

import pytest
import torch

from tests.unit.ops import inputs
from vllm_relay.ops import providers, reference, system_attention
from vllm_relay.ops.attention import torch as plain


def check(q, k, v, attend=system_attention, **kwargs):
    exact, exact_lse = reference.attention_lse(q, k, v)
    out, lse = attend(q, k, v, **kwargs)
    inputs.assert_as_good(out, inputs.stock(q, k, v), exact)
    inputs.assert_lse(lse, exact_lse, q.dtype)


def qkv(tokens, keys, heads=(6, 2), head_size=64, dtype=torch.bfloat16):
    q_heads, kv_heads = heads
    return (
        inputs.normal(tokens, q_heads, head_size, dtype=dtype, seed=1),
        inputs.normal(keys, kv_heads, head_size, dtype=dtype, seed=2),
        inputs.normal(keys, kv_heads, head_size, dtype=dtype, seed=3),
    )


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("head_size", inputs.HEAD_SIZES)
@pytest.mark.parametrize("heads", inputs.HEADS, ids=["mha", "gqa", "mqa"])
def test_against_oracle(heads, head_size, dtype):
    check(*qkv(7, 133, heads, head_size, dtype))


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("heads", inputs.HEADS, ids=["mha", "gqa", "mqa"])
def test_plain_torch_provider(heads, dtype):
    check(*qkv(7, 133, heads, 80, dtype), attend=plain.system_attention, scale=80**-0.5)


def skip_unless_usable(op, q, k, v):
    try:
        providers.choose(op, q, k, v)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("provider", [None, "flash-attn", "triton", "xformers", "torch"])
def test_providers_on_a_gpu(provider, dtype):
    def attend(*args):
        args = [x.cuda() for x in args]
        with providers.use("system", provider):
            skip_unless_usable("system", *args)
            out, lse = system_attention(*args)
        return out.cpu(), lse.cpu()

    for heads in inputs.HEADS:
        for head_size in inputs.HEAD_SIZES:
            check(*qkv(7, 133, heads, head_size, dtype), attend)
    for tokens, keys in [(1, 1), (1, 517), (37, 1), (65, 31)]:
        check(*qkv(tokens, keys, dtype=dtype), attend)


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 517), (37, 1), (65, 31)])
@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
def test_odd_sizes(tokens, keys, dtype):
    check(*qkv(tokens, keys, dtype=dtype))


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("heads", inputs.HEADS, ids=["mha", "gqa", "mqa"])
def test_any_strides(heads, dtype):
    # Keys turned within the head, values a slice of a wider row, queries with channels outermost:
    # torch's kernel answers wrongly, without an error, where channels are not dense.
    q, k, v = qkv(5, 70, heads, dtype=dtype)
    q = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    k = k.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    v = torch.cat([v, v + 1], -1)[..., :64]
    check(q, k, v)
    check(q, v, k)


def test_no_keys():
    q, k, v = qkv(3, 0)
    out, lse = system_attention(q, k, v)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((6, 3), -torch.inf))


@pytest.mark.parametrize("keys", [0, 9])
def test_no_queries(keys):
    out, lse = system_attention(*qkv(0, keys))
    assert out.shape == (0, 6, 64)
    assert lse.shape == (6, 0)


def test_scale():
    q, k, v = qkv(4, 50, dtype=torch.float32)
    exact, exact_lse = reference.attention_lse(q, k, v, 0.31)
    out, lse = system_attention(q, k, v, scale=0.31)
    scaled = inputs.stock(q * (0.31 * 8), k, v)
    inputs.assert_as_good(out, scaled, exact)
    inputs.assert_lse(lse, exact_lse, q.dtype)


def test_large_scores_do_not_overflow():
    q, k, v = qkv(4, 50)
    check(q * 20, k * 20, v)


BAD = {
    "q not a tensor": ("q", lambda a: {**a, "q": [1.0]}),
    "q rank": ("q", lambda a: {**a, "q": a["q"][0]}),
    "q dtype": ("q", lambda a: {**a, "q": a["q"].double()}),
    "q without heads": ("q", lambda a: {**a, "q": a["q"][:, :0]}),
    "q device": ("k", lambda a: {**a, "q": a["q"].to("meta")}),
    "k rank": ("k", lambda a: {**a, "k": a["k"][None]}),
    "k dtype": ("k", lambda a: {**a, "k": a["k"].float()}),
    "k head size": ("k", lambda a: {**a, "k": a["k"][..., :32]}),
    "k heads": ("k", lambda a: {**a, "k": a["k"].repeat(1, 2, 1)}),
    "k without heads": ("k", lambda a: {**a, "k": a["k"][:, :0]}),
    "v length": ("v", lambda a: {**a, "v": a["v"][1:]}),
    "v dtype": ("v", lambda a: {**a, "v": a["v"].half()}),
    "v device": ("v", lambda a: {**a, "v": a["v"].to("meta")}),
    "scale nan": ("scale", lambda a: {**a, "scale": inputs.NAN}),
    "scale text": ("scale", lambda a: {**a, "scale": "0.1"}),
}


@pytest.mark.parametrize(("name", "spoil"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(name, spoil):
    arguments = spoil(dict(zip("qkv", qkv(3, 8), strict=True)))
    with pytest.raises(ValueError, match=rf"^{name}: "):
        system_attention(**arguments)
