"""relay_fusion on the CPU against the float64 oracle; given outputs are filled with NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ops import inputs
from vllm_relay.ops import context_attention, reference, relay_fusion, system_attention
from vllm_relay.ops.fusion import native
from vllm_relay.ops.native import library


@pytest.fixture(params=["native", "torch"])
def kernel(request, monkeypatch):
    """Each of the two that run on the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(native, "usable", lambda *_: False)
    elif isinstance(library.library(), str):
        pytest.skip(library.library())


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [32, 80, 96, 112, 256])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_against_oracle(n, head_size, dtype, kernel):
    outs, lses = inputs.partials(n, 7, 5, head_size, dtype)
    inputs.assert_fused(relay_fusion(outs, lses), reference.relay_fusion(outs, lses))


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("dead", [-inputs.INF, inputs.INF])
def test_empty_partials(n, dead, dtype, kernel):
    outs, lses = inputs.partials(n, 6, 4, 64, dtype)
    for i in range(n):
        lses[i][:, i] = dead
        outs[i][i] = inputs.NAN
        lses[i][0, 5] = dead
        outs[i][5, 0] = inputs.INF
    exact = reference.relay_fusion(outs, lses)
    got = relay_fusion(outs, lses)
    inputs.assert_fused(got, exact)
    assert torch.equal(got[5, 0], torch.zeros(64, dtype=dtype))


def test_nan_lse_is_not_hidden(kernel):
    outs, lses = inputs.partials(2, 3, 2, 32, torch.float32)
    lses[0][1, 2] = inputs.NAN
    lses[1][0, 0] = -inputs.INF
    got = relay_fusion(outs, lses)
    assert got[2, 1].isnan().all()
    assert int(got.isnan().any(-1).sum()) == 1


def test_given_out(kernel):
    outs, lses = inputs.partials(2, 5, 3, 64, torch.bfloat16)
    wide = torch.full((5, 4, 80), inputs.NAN, dtype=torch.bfloat16)
    out = wide[:, 1:, 8:72]
    assert relay_fusion(outs, lses, out=out) is out
    inputs.assert_fused(out, reference.relay_fusion(outs, lses))
    assert wide[:, 0].isnan().all()
    assert wide[:, :, :8].isnan().all()
    assert wide[:, :, 72:].isnan().all()


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_out_may_be_a_partial(which, dtype, kernel):
    outs, lses = inputs.partials(3, 5, 3, 64, dtype)
    lses[which][:, 0] = -inputs.INF
    outs[which][0] = inputs.NAN
    exact = reference.relay_fusion(outs, lses)
    inputs.assert_fused(relay_fusion(outs, lses, out=outs[which]), exact)
    outs, lses = inputs.partials(3, 5, 3, 64, dtype)
    exact = reference.relay_fusion(outs, lses)
    inputs.assert_fused(relay_fusion(outs, lses, out=outs[which]), exact)


def test_inputs_are_left_alone(kernel):
    outs, lses = inputs.partials(2, 5, 3, 64, torch.float32)
    lses[0][:, 1] = inputs.INF
    before = [x.clone() for x in (*outs, *lses)]
    relay_fusion(outs, lses)
    assert all(torch.equal(a, b) for a, b in zip(before, (*outs, *lses), strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_no_tokens(n):
    outs, lses = inputs.partials(n, 0, 3, 64, torch.float32)
    assert relay_fusion(outs, lses).shape == (0, 3, 64)


def test_strided_partials():
    outs, lses = inputs.partials(2, 5, 3, 64, torch.bfloat16)
    strided = [o.permute(2, 1, 0).contiguous().permute(2, 1, 0) for o in outs]
    turned = [lse.t().contiguous().t() for lse in lses]
    assert torch.equal(relay_fusion(strided, turned), relay_fusion(outs, lses))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 40), st.integers(1, 3))
def test_splitting_changes_nothing(parts, last, tokens):
    """n parts of one sequence, attended apart and fused, are attention on the whole."""
    total = sum(parts) + last
    q = inputs.normal(tokens, 4, 32, seed=5)
    k, v = (inputs.normal(total, 2, 32, seed=seed) for seed in (6, 7))
    partials = []
    start = 0
    for length in parts:
        end = start + length
        partials.append(system_attention(q, k[start:end], v[start:end]))
        start = end
    # The last part is paged, each query a row of its own over the same blocks.
    size = 8
    blocks = -(-last // size)
    caches = []
    for x in (k, v):
        cache = torch.full((blocks * size, 2, 32), inputs.NAN)
        cache[:last] = x[start:]
        caches.append(cache.view(blocks, size, 2, 32))
    partials.append(
        context_attention(
            q,
            *caches,
            torch.arange(blocks, dtype=torch.int32).expand(tokens, -1),
            torch.full((tokens,), last, dtype=torch.int32),
            torch.arange(tokens + 1, dtype=torch.int32),
        )
    )
    exact, _ = reference.attention_lse(q, k, v)
    fused = relay_fusion(*zip(*partials, strict=True))
    inputs.assert_as_good(fused, inputs.stock(q, k, v), exact)


BAD = {
    "no partials": ("outs", lambda o, s: ([], [], None)),
    "counts differ": ("lses", lambda o, s: (o, s[:1], None)),
    "outs rank": (r"outs\[0\]", lambda o, s: ([o[0][0], o[1]], s, None)),
    "outs dtype": (r"outs\[0\]", lambda o, s: ([x.double() for x in o], s, None)),
    "outs shape": (r"outs\[1\]", lambda o, s: ([o[0], o[1][1:]], s, None)),
    "outs dtypes differ": (r"outs\[1\]", lambda o, s: ([o[0], o[1].half()], s, None)),
    "outs devices differ": (r"outs\[1\]", lambda o, s: ([o[0], o[1].to("meta")], s, None)),
    "lse layout": (r"lses\[0\]", lambda o, s: (o, [s[0].t(), s[1]], None)),
    "lse dtype": (r"lses\[1\]", lambda o, s: (o, [s[0], s[1].bfloat16()], None)),
    "lse device": (r"lses\[1\]", lambda o, s: (o, [s[0], s[1].to("meta")], None)),
    "lse missing": (r"lses\[1\]", lambda o, s: (o, [s[0], None], None)),
    "out shape": ("out", lambda o, s: (o, s, o[0][1:])),
    "out dtype": ("out", lambda o, s: (o, s, o[0].half())),
    "out device": ("out", lambda o, s: (o, s, o[0].to("meta"))),
}


@pytest.mark.parametrize(("name", "spoil"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(name, spoil):
    outs, lses, out = spoil(*inputs.partials(2, 5, 3, 64, torch.float32))
    with pytest.raises(ValueError, match=rf"^{name}: "):
        relay_fusion(outs, lses, out=out)
