"""The Triton fusion kernel under the interpreter."""

import pytest
import torch

from tests.unit.ops import inputs
from vllm_relay.ops import reference
from vllm_relay.ops.fusion.triton import fuse, merge_into
from vllm_relay.ops.step.gather import gather_rows


def relay_fusion(outs, lses, out=None):
    out = torch.full_like(outs[0], inputs.NAN) if out is None else out
    fuse(outs, lses, out)
    return out


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [32, 80, 96, 112, 256])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_against_oracle(n, head_size, dtype):
    outs, lses = inputs.partials(n, 3, 5, head_size, dtype)
    out = torch.full_like(outs[0], inputs.NAN)
    relay_fusion(outs, lses, out=out)
    inputs.assert_fused(out, reference.relay_fusion(outs, lses))


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (1, 71), (5, 13)])
def test_odd_sizes(tokens, heads):
    # 71 heads of 64 take three programs per token, the last one partly masked.
    outs, lses = inputs.partials(2, tokens, heads, 64, torch.bfloat16)
    inputs.assert_fused(relay_fusion(outs, lses), reference.relay_fusion(outs, lses))


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
    inputs.assert_fused(got, reference.relay_fusion(outs, lses))
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
    inputs.assert_fused(out, exact)
    assert wide[:, 0].isnan().all()
    assert wide[:, :, :8].isnan().all()
    assert wide[:, :, 88:].isnan().all()
    inputs.assert_fused(relay_fusion(outs, lses, out=outs[1]), exact)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_merge_into_takes_partials_from_their_own_order(n, dtype):
    outs, lses = inputs.partials(n + 1, 6, 5, 96, dtype)
    out, lse = outs[0], lses[0]
    index = torch.stack([torch.randperm(6).int() for _ in range(n)])
    index[0, 1] = index[:, 4] = -1
    index[0, 2] = -7
    # The same partials in the batch's order, dead where there is none.
    sorted_outs, sorted_lses = [out.clone()], [lse.clone()]
    for i in range(n):
        places = index[i].long().clamp(min=0)
        sorted_outs.append(outs[i + 1][places])
        sorted_lses.append(lses[i + 1][:, places].masked_fill(index[i] < 0, -inputs.INF))
    exact = reference.relay_fusion(sorted_outs, sorted_lses)
    before = out.clone()
    assert merge_into(out, lse, outs[1:], lses[1:], index) is out
    inputs.assert_fused(out, exact)
    assert torch.equal(out[4], before[4])


def test_merge_into_reads_neither_dead_partials_nor_tokens_of_no_group():
    outs, lses = inputs.partials(2, 5, 3, 64, torch.float32)
    index = torch.tensor([[3, -1, 0, 2, -1]], dtype=torch.int32)
    lses[1][1, 0] = -inputs.INF
    outs[1][0, 1] = inputs.NAN
    outs[1][4], lses[1][:, 4] = inputs.NAN, inputs.NAN  # no token's place
    lses[0][:, 1], outs[0][1] = inputs.NAN, 7.0  # of no row: not written by attention
    before = outs[0].clone()
    merge_into(outs[0], lses[0], outs[1:], lses[1:], index)
    assert torch.equal(outs[0][[1, 4]], before[[1, 4]])
    assert torch.equal(outs[0][2, 1], before[2, 1])
    assert not outs[0].isnan().any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("index", {"index": torch.zeros(2, 5).int()}),
        ("index", {"index": torch.zeros(1, 4).int()}),
        ("index", {"index": torch.zeros(1, 5).long()}),
        ("index", {"index": torch.zeros(1, 10).int()[:, ::2]}),
        ("lses", {"lses": []}),
    ],
)
def test_merge_into_names_bad_arguments(name, change):
    outs, lses = inputs.partials(2, 5, 3, 32, torch.float32)
    given = {"outs": outs[1:], "lses": lses[1:], "index": torch.zeros(1, 5).int()}
    with pytest.raises(ValueError, match=rf"^{name}: "):
        merge_into(outs[0], lses[0], **{**given, **change})


@pytest.mark.parametrize("shape", [(1, 1, 32), (5, 3, 80), (4, 71, 64)])
def test_gather_gives_each_level_its_tokens(shape):
    wide = inputs.normal(shape[0], shape[1], shape[2] + 8, dtype=torch.bfloat16)
    x = wide[..., 4:-4]
    index = torch.stack([torch.randperm(shape[0]), torch.full((shape[0],), -1)]).int()
    got = gather_rows(x, index)
    assert torch.equal(got[0, index[0].long()], x)
    none = torch.full((1, shape[0]), -1, dtype=torch.int32)
    assert gather_rows(x, none).shape == (1, *shape)
    with pytest.raises(ValueError, match=r"^index: "):
        gather_rows(x, index.long())


def test_no_tokens():
    outs, lses = inputs.partials(2, 0, 3, 64, torch.float32)
    assert relay_fusion(outs, lses).shape == (0, 3, 64)
