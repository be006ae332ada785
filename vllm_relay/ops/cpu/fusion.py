"""Relay fusion on the CPU: our own kernel, or plain torch in few calls, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_relay.ops.cpu.attention import fuse
from vllm_relay.ops.native import library as native


def relay_fusion(outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """Arguments as `vllm_relay.ops.relay_fusion`, checked there; runs on any device."""
    if out is None:
        out = torch.empty_like(outs[0], memory_format=torch.contiguous_format)
    if (
        outs[0].device.type == "cpu"
        and native.unusable(outs[0].dtype, outs[0].shape[-1]) is None
        and all(x.stride(-1) == 1 for x in (*outs, out))
    ):
        fuse(outs, lses, out)
        return out
    return out.copy_(_merge(outs, lses))


def fuse_into(
    out: Tensor, index: Tensor | None, outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> None:
    """Fuse partials of tokens in another order, each result straight to its place.

    Args:
        out: [T, H, D], written at the places in index only.
        index: int64 [N], where in out each token belongs; None: the first N places, in order.
        outs, lses: as `vllm_relay.ops.relay_fusion`, of N tokens.
    """
    merged = _merge(outs, lses)
    if index is None:
        out[: len(merged)].copy_(merged)
    else:
        out[index] = merged.to(out.dtype)


def _merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """The fused output [T, H, D], in float32 or the dtype of outs."""
    lse = torch.stack(tuple(lses))
    # One flag for the whole call: the common step has no empty partial and skips the masking.
    finite = bool(torch.isfinite(lse).all())
    if not finite:
        dead = torch.isinf(lse)
        outs = [o.masked_fill(d.t().unsqueeze(-1), 0) for o, d in zip(outs, dead, strict=True)]
        lse.masked_fill_(dead, -torch.inf)
    weights = torch.softmax(lse, 0)
    if not finite:
        # softmax over nothing but -inf is NaN; a NaN that came in as an lse stays one.
        weights.masked_fill_(dead, 0)
    # [n, H, T] -> [n, T, H, 1]
    weights = weights.transpose(1, 2).unsqueeze(-1)
    # A float32 sum of its own, so that an output may be one of `outs`.
    total = outs[0] * weights[0]
    for partial, weight in zip(outs[1:], weights[1:], strict=True):
        total.addcmul_(partial.float(), weight)
    return total
