"""The merge of attention over splits of the keys: as relay fusion, with the LSE and any number.

Exercised under Triton's interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Elements of one program's tile, as in relay fusion.
_TILE = 2048


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [T, Hq, D], contiguous
    lse_ptr,  # [Hq, T], float32, contiguous
    outs_ptr,  # [splits, T, Hq, D], float32, contiguous
    lses_ptr,  # [splits, Hq, T], float32, contiguous
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
    channel_ok = channel < HEAD_SIZE
    lse_at = head * tokens + token
    out_at = (token * heads + head)[:, None] * HEAD_SIZE + channel[None, :]
    plane = heads.to(tl.int64) * tokens

    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_H], tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for split in range(splits):
        lse = tl.load(lses_ptr + split * plane + lse_at, mask=head_ok, other=float("-inf"))
        live = lse != float("-inf")
        new_peak = tl.maximum(peak, lse)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp(peak - shift)
        weight = tl.where(live, tl.exp(lse - shift), 0.0)
        # A split that attended to nothing is not loaded: it was never written.
        at = outs_ptr + split * plane * HEAD_SIZE + out_at
        partial = tl.load(at, mask=live[:, None] & channel_ok[None, :], other=0.0)
        norm = norm * decay + weight
        total = total * decay[:, None] + partial * weight[:, None]
        peak = new_peak

    norm = tl.where(norm == 0.0, 1.0, norm)
    total = total / norm[:, None]
    store_ok = head_ok[:, None] & channel_ok[None, :]
    tl.store(out_ptr + out_at, total.to(out_ptr.dtype.element_ty), mask=store_ok)
    tl.store(lse_ptr + lse_at, peak + tl.log(norm), mask=head_ok)


def merge_splits(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge n partials of the same queries into `out` and `lse`. All are contiguous.

    Args:
        outs: [n, T, Hq, D] float32; not read where `lses` is -inf.
        lses: [n, Hq, T] float32, natural logarithm.
        out: [T, Hq, D], any float; 0 where all partials are -inf.
        lse: [Hq, T] float32.
    """
    splits, tokens, heads, head_size = outs.shape
    block_d = triton.next_power_of_2(head_size)
    block_h = min(triton.next_power_of_2(heads), max(1, _TILE // block_d))
    kernel: Any = _merge_kernel
    kernel[(tokens, triton.cdiv(heads, block_h))](
        out,
        lse,
        outs,
        lses,
        splits,
        tokens,
        heads,
        HEAD_SIZE=head_size,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )
