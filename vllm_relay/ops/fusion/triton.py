"""Relay fusion in Triton: one pass over the partials, nothing written but the result.

Two kernels with one formula: `fuse` and `merge_into` take tensors of their own strides, in the
batch's order or another; `merge_splits` takes any number of partials that lie one after another.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from vllm_relay.ops import checks

# Elements of one program's tile: 16 per thread at four warps, two 16-byte loads in bf16.
_TILE = 2048


@triton.jit
def _add(peak, norm, total, lse, partial_at, tile_ok):  # type: ignore[no-untyped-def]
    """One more partial: total and norm are relative to exp(peak), the largest LSE so far."""
    # +inf means "attended to nothing", as -inf does.
    live = (lse != float("-inf")) & (lse != float("inf"))
    # May drop a NaN; it reaches the result through its weight.
    new_peak = tl.where(live, tl.maximum(peak, lse), peak)
    # -inf - -inf is NaN: with no live partial yet, subtract 0.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp(peak - shift)
    weight = tl.where(live, tl.exp(lse - shift), 0.0)
    # A dead partial is not loaded: it may hold NaN, and NaN * 0 is NaN.
    partial = tl.load(partial_at, mask=tile_ok & live[:, None], other=0.0).to(tl.float32)
    # out * exp(lse) = sum_i out_i * exp(lse_i)
    return new_peak, norm * decay + weight, total * decay[:, None] + partial * weight[:, None]


@triton.jit
def _divided(total, norm):  # type: ignore[no-untyped-def]
    # The largest weight is exp(0), so a zero sum means that no partial was live.
    return total / tl.where(norm == 0.0, 1.0, norm)[:, None]


@triton.jit
def _fuse_kernel(  # type: ignore[no-untyped-def]
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
    norm = tl.zeros([BLOCK_H], tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for i in tl.static_range(len(lse_ptrs)):
        source = token
        if HAS_INDEX and i > 0:
            source = tl.load(index_ptr + (i - 1) * index_stride + token).to(tl.int64)
        at = lse_ptrs[i] + head * lses_strides[i][0] + tl.maximum(source, 0) * lses_strides[i][1]
        lse = tl.load(at, mask=head_ok, other=float("-inf"))
        lse = tl.where(source >= 0, lse, float("-inf"))
        at = out_ptrs[i] + source * outs_strides[i][0]
        at += (head * outs_strides[i][1])[:, None] + (channel * outs_strides[i][2])[None, :]
        peak, norm, total = _add(peak, norm, total, lse, at, tile_ok)

    at = out_ptr + token * out_strides[0]
    at += (head * out_strides[1])[:, None] + (channel * out_strides[2])[None, :]
    tl.store(at, _divided(total, norm).to(out_ptr.dtype.element_ty), mask=tile_ok)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [T, H, D], contiguous
    lse_ptr,  # [H, T], float32, contiguous
    outs_ptr,  # [splits, T, H, D], float32, contiguous
    lses_ptr,  # [splits, H, T], float32, contiguous
    splits,
    tokens,
    heads,
    HEAD_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = tl.arange(0, BLOCK_D)
    head_ok = head < heads
    tile_ok = head_ok[:, None] & (channel < HEAD_SIZE)[None, :]
    lse_at = head * tokens + token
    out_at = (token * heads + head)[:, None] * HEAD_SIZE + channel[None, :]
    plane = heads.to(tl.int64) * tokens

    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_H], tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for split in range(splits):
        lse = tl.load(lses_ptr + split * plane + lse_at, mask=head_ok, other=float("-inf"))
        at = outs_ptr + split * plane * HEAD_SIZE + out_at
        peak, norm, total = _add(peak, norm, total, lse, at, tile_ok)

    out = _divided(total, norm).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, out, mask=tile_ok)
    # A row that saw nothing: from its peak, -inf.
    tl.store(lse_ptr + lse_at, peak + tl.log(tl.where(norm == 0.0, 1.0, norm)), mask=head_ok)


def _tiling(tokens: int, heads: int, head_size: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of a kernel, and its tile."""
    block_d = triton.next_power_of_2(head_size)
    block_h = min(triton.next_power_of_2(heads), max(1, _TILE // block_d))
    tile = {"HEAD_SIZE": head_size, "BLOCK_H": block_h, "BLOCK_D": block_d}
    return (tokens, triton.cdiv(heads, block_h)), tile


def fuse(
    outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, index: Tensor | None = None
) -> None:
    """Arguments as `vllm_relay.ops.relay_fusion`, checked there; index as in `merge_into`."""
    if out.numel() == 0:
        return
    grid, tile = _tiling(*outs[0].shape)
    kernel: Any = _fuse_kernel
    kernel[grid](
        out,
        tuple(outs),
        tuple(lses),
        out if index is None else index,
        out.stride(),
        tuple(o.stride() for o in outs),
        tuple(lse.stride() for lse in lses),
        0 if index is None else index.stride(0),
        out.shape[1],
        HAS_INDEX=index is not None,
        **tile,
    )


def merge_into(
    out: Tensor, lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], index: Tensor
) -> Tensor:
    """Merge partials that lie in orders of their own into one that is in the batch's order.

    Args:
        out: [T, H, D], the partial in the batch's order; the result is written over it and
            returned. A token that is in none of ``outs`` keeps its bits.
        lse: [H, T] float32, its LSE.
        outs, lses: n >= 1 further partials, as in `vllm_relay.ops.relay_fusion`.
        index: [n, T] int32, last dim dense: token t is token index[i, t] of outs[i]; negative:
            outs[i] has nothing for it. Values are not checked, which would be a device sync.
    """
    checks.partials([out, *outs], [lse, *lses])
    if not outs:
        raise ValueError("outs: expected at least one partial beside out")
    checks.places(index, len(outs), out)
    fuse([out, *outs], [lse, *lses], out, index)
    return out


def merge_splits(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge n partials of the same queries into `out` and `lse`. All are contiguous.

    Args:
        outs: [n, T, H, D] float32; not read where `lses` is -inf.
        lses: [n, H, T] float32, natural logarithm.
        out: [T, H, D], any float; 0 where all partials are -inf.
        lse: [H, T] float32.
    """
    splits, tokens, heads, head_size = outs.shape
    grid, tile = _tiling(tokens, heads, head_size)
    kernel: Any = _merge_kernel
    kernel[grid](out, lse, outs, lses, splits, tokens, heads, **tile)
