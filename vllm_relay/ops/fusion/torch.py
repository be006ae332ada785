"""Relay fusion in plain torch, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def fuse(outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor) -> None:
    """Arguments as `vllm_relay.ops.relay_fusion`, checked there; written into out [T, H, D]."""
    lse = torch.stack(tuple(lses))
    dead = torch.isinf(lse)
    # softmax over nothing but -inf is NaN; a NaN that came in as an lse stays one.
    weights = torch.softmax(lse.masked_fill_(dead, -torch.inf), 0).masked_fill_(dead, 0)
    # [n, H, T] -> [n, T, H, 1]
    weights, dead = (x.transpose(1, 2).unsqueeze(-1) for x in (weights, dead))
    # A float32 sum of its own, so that out may be one of `outs`.
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for partial, weight, empty in zip(outs, weights, dead, strict=True):
        # What a dead partial holds may be NaN, and NaN * 0 is NaN.
        total.addcmul_(partial.float().masked_fill(empty, 0), weight)
    out.copy_(total)
