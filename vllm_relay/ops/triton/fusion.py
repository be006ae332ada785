"""Relay fusion in one Triton kernel: n partials, one pass, nothing written but the result.

Exercised under Triton's interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_relay.ops import checks

# Elements of one program's tile: 16 per thread at four warps, two 16-byte loads in bf16.
_TILE = 2048


@triton.jit
def _relay_fusion_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [T_out, H, D]
    out_ptrs,  # n of [T, H, D]
    lse_ptrs,  # n of [H, T], float32
    rows_ptr,  # [T], int32; not read unless HAS_ROWS
    out_strides,  # (token, head, channel)
    outs_strides,  # n of (token, head, channel)
    lses_strides,  # n of (head, token)
    num_heads,
    HEAD_SIZE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # 64-bit: T * H * D passes 2**31 in long prefills.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = tl.arange(0, BLOCK_D)
    head_ok = head < num_heads
    tile_ok = head_ok[:, None] & (channel < HEAD_SIZE)[None, :]

    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for i in tl.static_range(len(lse_ptrs)):
        at = lse_ptrs[i] + head * lses_strides[i][0] + token * lses_strides[i][1]
        lse = tl.load(at, mask=head_ok, other=float("-inf"))
        # +inf means "attended to nothing", as -inf does.
        lse = tl.where(lse == float("inf"), float("-inf"), lse)
        # May drop a NaN; it reaches the result through its weight below.
        peak = tl.maximum(peak, lse)
    # -inf - -inf is NaN: with no live partial, subtract 0 and let every weight be exp(-inf).
    peak = tl.where(peak == float("-inf"), 0.0, peak)

    norm = tl.zeros([BLOCK_H], tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for i in tl.static_range(len(out_ptrs)):
        # Read again rather than kept: n values per head, still in L1.
        at = lse_ptrs[i] + head * lses_strides[i][0] + token * lses_strides[i][1]
        lse = tl.load(at, mask=head_ok, other=float("-inf"))
        live = (lse != float("-inf")) & (lse != float("inf"))
        weight = tl.where(live, tl.exp(lse - peak), 0.0)
        norm += weight
        at = out_ptrs[i] + token * outs_strides[i][0]
        at += (head * outs_strides[i][1])[:, None] + (channel * outs_strides[i][2])[None, :]
        # A dead partial is not loaded: it may hold NaN, and NaN * 0 is NaN.
        partial = tl.load(at, mask=tile_ok & live[:, None], other=0.0)
        total += partial.to(tl.float32) * weight[:, None]
    # The largest weight is exp(0), so a zero sum means that no partial was live.
    total = total / tl.where(norm == 0.0, 1.0, norm)[:, None]

    row = token
    if HAS_ROWS:
        row = tl.load(rows_ptr + token).to(tl.int64)
    at = out_ptr + row * out_strides[0]
    at += (head * out_strides[1])[:, None] + (channel * out_strides[2])[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=tile_ok)


def _launch(
    outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, rows: Tensor | None
) -> None:
    tokens, heads, head_size = outs[0].shape
    if outs[0].numel() == 0:
        return
    block_d = triton.next_power_of_2(head_size)
    block_h = min(triton.next_power_of_2(heads), max(1, _TILE // block_d))
    grid = (tokens, triton.cdiv(heads, block_h))
    kernel: Any = _relay_fusion_kernel
    kernel[grid](
        out,
        tuple(outs),
        tuple(lses),
        out if rows is None else rows,
        out.stride(),
        tuple(o.stride() for o in outs),
        tuple(lse.stride() for lse in lses),
        heads,
        HEAD_SIZE=head_size,
        HAS_ROWS=rows is not None,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )


def relay_fusion(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    out: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """`vllm_relay.ops.relay_fusion` on CUDA, with an optional scatter of the result.

    Args:
        outs, lses: as there.
        out: [T, H, D]; with `rows` any number of tokens, and rows not named keep their content.
            May be one of `outs` only without `rows`: programs would overwrite unread partials.
        rows: [T] int32, distinct, contiguous: token t goes to out[rows[t]]. The values are not
            checked, which would be a device sync. None is the identity.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    checks.partials(outs, lses)
    first = outs[0]
    if out is None:
        out = torch.empty_like(first, memory_format=torch.contiguous_format)
    tokens = first.shape[0] if rows is None else out.shape[0]
    checks.shape("out", out, (tokens, *first.shape[1:]), "[T, H, D]")
    checks.like("out", out, "outs[0]", first)
    if rows is not None:
        checks.shape("rows", rows, (first.shape[0],), "[T]")
        if rows.dtype != torch.int32:
            raise ValueError(f"rows: expected int32, got {rows.dtype}")
        if rows.device != first.device or not rows.is_contiguous():
            raise ValueError(f"rows: expected a contiguous tensor on {first.device}")
    _launch(outs, lses, out, rows)
    return out
