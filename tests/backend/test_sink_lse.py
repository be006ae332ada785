"""The LSE recovered from sinks: fused outputs stay within the rounding of the kernel's dtype,
whatever the magnitudes.
"""

import pytest
import torch

from vllm_relay.backend.sink_lse import (
    attend_with_lse,
    give_heads_twice,
    part_both,
    sinks_for_both,
)
from vllm_relay.ops import reference

HEADS, ROWS, DIM = 5, 7, 64
DTYPES = (torch.bfloat16, torch.float32)


class Kernel:
    """An attention kernel with sinks: exact, but for the rounding of its output."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> None:
        self._out, self._lse, self._dtype, self.calls = out, lse, dtype, 0

    def __call__(self, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert sinks.dtype == torch.bfloat16 and sinks.isfinite().all()
        self.calls += 1
        share = torch.sigmoid(self._lse - sinks.double()[:, None])  # [H, T]
        with_sink = self._out * share.T[..., None]
        return self._out.to(self._dtype), with_sink.to(self._dtype)


def _case(dtype: torch.dtype, distance: float, spread: float, size: float = 0.3) -> tuple:
    """Exact partials whose LSEs differ by about ``distance``, and by ``spread`` among rows."""
    g = torch.Generator().manual_seed(int(distance * 10 + spread))
    system_lse = torch.randn(HEADS, ROWS, generator=g, dtype=torch.float64) * spread + 20
    lse = system_lse + distance + torch.randn(HEADS, ROWS, generator=g, dtype=torch.float64)
    out, system_out = torch.randn(2, ROWS, HEADS, DIM, generator=g, dtype=torch.float64) * size
    return out, lse, system_out, system_lse, Kernel(out, lse, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("distance", [-60.0, -20.0, -8.0, -2.0, 0.0, 2.0, 8.0, 20.0, 60.0])
@pytest.mark.parametrize("spread", [0.0, 3.0, 100.0])
def test_the_fused_output_moves_by_less_than_its_rounding(
    dtype: torch.dtype, distance: float, spread: float
) -> None:
    out, lse, system_out, system_lse, kernel = _case(dtype, distance, spread)
    got, found, unknown = attend_with_lse(kernel, system_lse.float())
    assert torch.equal(got, out.to(dtype))
    assert not unknown.any() and found.shape == (HEADS, ROWS) and found.dtype == torch.float32
    exact = reference.relay_fusion([system_out, out], [system_lse, lse])
    fused = reference.relay_fusion([system_out, out], [system_lse, found.double()])
    # half a rounding of the weight, and that of an LSE held in fp32 (contract 3), times the
    # distance of the partials
    scale = (system_out - out).abs().amax()
    rounding = torch.finfo(dtype).eps / 2 + lse.abs().amax() * torch.finfo(torch.float32).eps / 4
    assert (fused - exact).abs().max() <= scale * rounding
    assert kernel.calls == 1 or spread > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_call_is_enough_for_rows_alike(dtype: torch.dtype) -> None:
    _, _, _, system_lse, kernel = _case(dtype, 0.0, 5.0)
    attend_with_lse(kernel, system_lse.float())
    assert kernel.calls == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_too_small_to_tell_are_named(dtype: torch.dtype) -> None:
    out, _, _, system_lse, kernel = _case(dtype, 0.0, 0.0)
    out[2, 3] = 0
    _, _, unknown = attend_with_lse(kernel, system_lse.float())
    expected = torch.zeros(HEADS, ROWS, dtype=torch.bool)
    expected[3, 2] = True
    assert torch.equal(unknown, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lses_beyond_the_resolution_of_a_sink_end_too(dtype: torch.dtype) -> None:
    _, lse, _, system_lse, kernel = _case(dtype, 0.0, 3.0)
    lse += 5000
    _, found, _ = attend_with_lse(kernel, (system_lse + 5000).float())
    assert found.isfinite().all() and kernel.calls <= ROWS + 1


def test_a_nan_ends_in_the_result_and_not_in_a_loop() -> None:
    out, _, _, system_lse, kernel = _case(torch.bfloat16, 0.0, 0.0)
    system_lse[1, 1] = torch.nan
    out[3, 2] = torch.nan
    _, found, _ = attend_with_lse(kernel, system_lse.float())
    assert found[2, 3].isnan() and found[0].isfinite().sum() == ROWS


def test_both_halves_come_back_in_the_order_of_the_heads() -> None:
    query = torch.randn(3, 6, 4)
    both = give_heads_twice(query, 2)
    assert both.shape == (3, 12, 4)
    # the kernel serves query heads [h * 2g, (h + 1) * 2g) with KV head h
    assert torch.equal(both[:, :6], torch.cat([query[:, :3], query[:, :3]], 1))
    first, second = part_both(both, 2)
    assert torch.equal(first, query) and torch.equal(second, query)
    sinks = torch.arange(6.0, dtype=torch.bfloat16)
    low, given = part_both(sinks_for_both(sinks, 2)[None, :, None], 2)
    assert torch.equal(given.flatten(), sinks) and (low < -1e29).all()
