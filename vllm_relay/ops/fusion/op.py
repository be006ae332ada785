"""Relay fusion: the exact merge of attention partials."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_relay.ops import checks
from vllm_relay.ops.fusion import native
from vllm_relay.ops.fusion import torch as plain


def relay_fusion(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out: Tensor | None = None
) -> Tensor:
    """Merge n >= 1 partials of the same queries over disjoint keys, in one pass.

    `out = sum_i out_i * exp(lse_i - lse)`, `lse = logsumexp_i lse_i` (RelayAttention, arXiv
    2402.14808, eq. 7-12; FlashInfer, arXiv 2501.01005, section 2.2).

    Args:
        outs: n tensors [T, H, D], bf16, fp16 or fp32, any strides.
        lses: n tensors [H, T] float32, natural logarithm, any strides. -inf: this partial
            attended to nothing and is not read, so its out may hold NaN. +inf is read as -inf
            (FlashAttention 2 writes it for an empty sequence).
        out: where to write, shaped and typed as outs[0], any strides; may be one of `outs`.

    Returns:
        [T, H, D] in the dtype of outs[0], accumulated in float32; 0 where every lse is -inf.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    checks.partials(outs, lses)
    if out is None:
        out = torch.empty_like(outs[0], memory_format=torch.contiguous_format)
    checks.shape("out", out, tuple(outs[0].shape), "[T, H, D]")
    checks.like("out", out, "outs[0]", outs[0])
    if outs[0].is_cuda:
        # Imported here: triton is absent or useless where there is no GPU.
        from vllm_relay.ops.fusion.triton import fuse

        fuse(outs, lses, out)
    elif native.usable(outs, out):
        native.fuse(outs, lses, out)
    else:
        plain.fuse(outs, lses, out)
    return out
