"""Relay fusion in one Triton kernel: n partials, one pass, nothing written but the result.

Partials may lie in another order than the batch (`merge_into`), as those of system attention do.

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
    out_ptr,  # [T, H, D]
    out_ptrs,  # n of [T, H, D]
    lse_ptrs,  # n of [H, T], float32
    index_ptr,  # [n - 1, T], int32; not read unless HAS_INDEX
    out_strides,  # (token, head, channel)
    outs_strides,  # n of (token, head, channel)
    lses_strides,  # n of (head, token)
    index_stride,
    num_heads,
    HEAD_SIZE: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # 64-bit: T * H * D passes 2**31 in long prefills.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = tl.arange(0, BLOCK_D)
    head_ok = head < num_heads
    tile_ok = head_ok[:, None] & (channel < HEAD_SIZE)[None, :]

    if HAS_INDEX:
        # Most tokens of most batches are in no group: out is theirs already.
        last = tl.load(index_ptr + token)
        for i in tl.static_range(1, len(lse_ptrs) - 1):
            last = tl.maximum(last, tl.load(index_ptr + i * index_stride + token))
        if last < 0:
            return

    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for i in tl.static_range(len(lse_ptrs)):
        source = token
        if HAS_INDEX and i > 0:
            source = tl.load(index_ptr + (i - 1) * index_stride + token).to(tl.int64)
        at = lse_ptrs[i] + head * lses_strides[i][0] + tl.maximum(source, 0) * lses_strides[i][1]
        lse = tl.load(at, mask=head_ok, other=float("-inf"))
        lse = tl.where(source >= 0, lse, float("-inf"))
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
        source = token
        if HAS_INDEX and i > 0:
            source = tl.load(index_ptr + (i - 1) * index_stride + token).to(tl.int64)
        at = lse_ptrs[i] + head * lses_strides[i][0] + tl.maximum(source, 0) * lses_strides[i][1]
        lse = tl.load(at, mask=head_ok, other=float("-inf"))
        lse = tl.where(source >= 0, lse, float("-inf"))
        live = (lse != float("-inf")) & (lse != float("inf"))
        weight = tl.where(live, tl.exp(lse - peak), 0.0)
        norm += weight
        at = out_ptrs[i] + source * outs_strides[i][0]
        at += (head * outs_strides[i][1])[:, None] + (channel * outs_strides[i][2])[None, :]
        # A dead partial is not loaded: it may hold NaN, and NaN * 0 is NaN.
        partial = tl.load(at, mask=tile_ok & live[:, None], other=0.0)
        total += partial.to(tl.float32) * weight[:, None]
    # The largest weight is exp(0), so a zero sum means that no partial was live.
    total = total / tl.where(norm == 0.0, 1.0, norm)[:, None]

    at = out_ptr + token * out_strides[0]
    at += (head * out_strides[1])[:, None] + (channel * out_strides[2])[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=tile_ok)


def _launch(
    outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, index: Tensor | None
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
        out if index is None else index,
        out.stride(),
        tuple(o.stride() for o in outs),
        tuple(lse.stride() for lse in lses),
        0 if index is None else index.stride(0),
        heads,
        HEAD_SIZE=head_size,
        HAS_INDEX=index is not None,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )


def relay_fusion(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out: Tensor | None = None
) -> Tensor:
    """`vllm_relay.ops.relay_fusion` on CUDA; arguments as there.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    checks.partials(outs, lses)
    first = outs[0]
    if out is None:
        out = torch.empty_like(first, memory_format=torch.contiguous_format)
    checks.shape("out", out, tuple(first.shape), "[T, H, D]")
    checks.like("out", out, "outs[0]", first)
    _launch(outs, lses, out, None)
    return out


def merge_into(
    out: Tensor, lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], index: Tensor
) -> Tensor:
    """Merge partials that lie in orders of their own into one that is in the batch's order.

    Args:
        out: [T, H, D], the partial in the batch's order; the result is written over it.
        lse: [H, T] float32, its LSE.
        outs, lses: n >= 1 further partials, as in `vllm_relay.ops.relay_fusion`.
        index: [n, T] int32, last dim dense: token t is token index[i, t] of outs[i]; negative:
            outs[i] has nothing for it. Values are not checked, which would be a device sync.

    Returns:
        out. A token that is in none of ``outs`` keeps its bits.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    checks.partials([out, *outs], [lse, *lses])
    checks.shape("index", index, (len(outs), out.shape[0]), "[n, T]")
    if not outs:
        raise ValueError("outs: expected at least one partial beside out")
    if index.dtype != torch.int32 or index.device != out.device or index.stride(-1) != 1:
        raise ValueError(f"index: expected int32 on {out.device} with a dense last dim")
    _launch([out, *outs], [lse, *lses], out, index)
    return out
