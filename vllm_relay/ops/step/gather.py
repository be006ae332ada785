"""Gather: the query tokens of each level in the order of the plan, in one launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_relay.ops import checks


# Not specialised on the number of tokens: graphs of all sizes share one kernel.
@triton.jit(do_not_specialize=["index_stride", "num_tokens"])
def _gather_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, H, D], any strides
    out_ptr,  # [n, T, H, D], contiguous
    index_ptr,  # int32 [n, T]
    token_stride,
    head_stride,
    channel_stride,
    index_stride,
    num_tokens,
    width,  # H * D
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    level = tl.program_id(1).to(tl.int64)
    place = tl.load(index_ptr + level * index_stride + token)
    if place >= 0:
        to = out_ptr + (level * num_tokens + place) * width
        for base in range(0, width, BLOCK):
            at = base + tl.arange(0, BLOCK)
            source = x_ptr + token * token_stride
            source += at // HEAD_SIZE * head_stride + at % HEAD_SIZE * channel_stride
            tl.store(to + at, tl.load(source, mask=at < width), mask=at < width)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Query tokens in the order of each level: out[i, index[i, t]] = x[t].

    Args:
        x: [T, H, D], any strides.
        index: int32 [n, T], last dim dense: place of token t in level i, distinct within a level;
            negative: none. Values are not checked, which would be a device sync.

    Returns:
        [n, T, H, D]; places of no token are not written.
    """
    checks.rank("x", x, 3, "[T, H, D]")
    checks.places(index, index.shape[0], x)
    tokens, heads, head_size = x.shape
    out = x.new_empty((index.shape[0], tokens, heads, head_size))
    if out.numel():
        # fp8 is moved as bytes: Triton has its types on some GPUs only.
        moved, to = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (x, out))
        kernel: Any = _gather_kernel
        kernel[(tokens, index.shape[0])](
            moved,
            to,
            index,
            *x.stride(),
            index.stride(0),
            tokens,
            heads * head_size,
            HEAD_SIZE=head_size,
            BLOCK=min(2048, triton.next_power_of_2(heads * head_size)),
        )
    return out
