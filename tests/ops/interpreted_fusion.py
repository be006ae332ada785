"""Cases for the Triton fusion kernel; run by test_fusion_triton.py with TRITON_INTERPRET=1.

Not collected on its own: Triton reads the variable when a kernel is defined, and a process that
has set it can compile no kernel.
"""

import pytest
import torch

from tests.ops import inputs
from vllm_relay.ops import reference
from vllm_relay.ops.triton.fusion import relay_fusion


def assert_fused(got, exact):
    """As good as `exact` cast once; the interpreter casts to bfloat16 by cutting the low bits."""
    if got.dtype == torch.bfloat16:
        cut = (exact.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
        inputs.assert_as_good(got, cut, exact)
    else:
        inputs.assert_fused(got, exact)


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [32, 80, 96, 112, 256])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_against_oracle(n, head_size, dtype):
    outs, lses = inputs.partials(n, 3, 5, head_size, dtype)
    out = torch.full_like(outs[0], inputs.NAN)
    relay_fusion(outs, lses, out=out)
    assert_fused(out, reference.relay_fusion(outs, lses))


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (1, 71), (5, 13)])
def test_odd_sizes(tokens, heads):
    # 71 heads of 64 take three programs per token, the last one partly masked.
    outs, lses = inputs.partials(2, tokens, heads, 64, torch.bfloat16)
    assert_fused(relay_fusion(outs, lses), reference.relay_fusion(outs, lses))


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("dead", [-inputs.INF, inputs.INF])
def test_empty_partials(n, dead):
    outs, lses = inputs.partials(n, 6, 3, 80, torch.bfloat16)
    for i in range(n):
        lses[i][:, i] = dead
        outs[i][i] = inputs.NAN
        lses[i][0, 5] = dead
        outs[i][5, 0] = inputs.INF
    got = relay_fusion(outs, lses)
    assert_fused(got, reference.relay_fusion(outs, lses))
    assert not got[5, 0].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_lse_is_not_hidden():
    outs, lses = inputs.partials(2, 3, 2, 32, torch.float32)
    lses[0][1, 2] = inputs.NAN
    got = relay_fusion(outs, lses)
    assert got[2, 1].isnan().all()
    assert int(got.isnan().any(-1).sum()) == 1


def test_strides_and_given_out():
    outs, lses = inputs.partials(2, 5, 3, 80, torch.bfloat16)
    exact = reference.relay_fusion(outs, lses)
    wide = torch.full((5, 4, 96), inputs.NAN, dtype=torch.bfloat16)
    strided = [outs[0].permute(2, 1, 0).contiguous().permute(2, 1, 0), outs[1]]
    turned = [lses[0], lses[1].t().contiguous().t()]
    out = wide[:, 1:, 8:88]
    assert relay_fusion(strided, turned, out=out) is out
    assert_fused(out, exact)
    assert wide[:, 0].isnan().all()
    assert wide[:, :, :8].isnan().all()
    assert wide[:, :, 88:].isnan().all()
    assert_fused(relay_fusion(outs, lses, out=outs[1]), exact)


def test_rows_scatter():
    outs, lses = inputs.partials(2, 4, 3, 96, torch.float32)
    rows = torch.tensor([5, 0, 3, 2], dtype=torch.int32)
    out = torch.full((6, 3, 96), inputs.NAN)
    relay_fusion(outs, lses, out=out, rows=rows)
    assert_fused(out[rows.long()], reference.relay_fusion(outs, lses))
    assert out[[1, 4]].isnan().all()


def test_no_tokens():
    outs, lses = inputs.partials(2, 0, 3, 64, torch.float32)
    assert relay_fusion(outs, lses).shape == (0, 3, 64)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("outs", {"outs": []}),
        ("lses", {"lses": []}),
        ("out", {"out": torch.empty(4, 3, 32)}),
        ("out", {"out": torch.empty(5, 3, 32).half()}),
        ("out", {"out": torch.empty(6, 2, 32), "rows": torch.arange(5).int()}),
        ("rows", {"rows": torch.arange(4).int()}),
        ("rows", {"rows": torch.arange(5)}),
        ("rows", {"rows": torch.arange(10).int()[::2]}),
    ],
)
def test_bad_arguments(name, change):
    outs, lses = inputs.partials(2, 5, 3, 32, torch.float32)
    with pytest.raises(ValueError, match=rf"^{name}: "):
        relay_fusion(**{"outs": outs, "lses": lses, **change})
