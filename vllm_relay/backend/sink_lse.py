"""The log-sum-exp of attention from a kernel that returns only the output.

vLLM's CPU kernel is fast, reads every KV layout the engine writes, and returns no LSE. It does take
attention sinks: a sink of logit ``s`` joins the softmax with value zero, so with ``Z = exp(lse)``

    out_sink = out * Z / (Z + exp(s)) = out * sigmoid(lse - s).

With every query head given twice, once with a sink far below all logits and once with ``s``, one
call reads the keys and values once and returns both outputs. Then
``sigma = <out_sink, out> / <out, out>`` and ``lse = s + logit(sigma)``.

Why this is exact enough: let w be the weight that relay fusion gives this partial against the
system partial. sigma has the relative rounding error e of the kernel's dtype, so w is off by
``w (1 - w) e / (1 - sigma)``. With s a little (`_MARGIN`) above the system partial's LSE that is at
most ``e / 2``: the fused output moves by less than its own rounding. Three cases in which this
would not hold are handled: sinks too far from a row's own LSE (another round), sigma that rounds
to 1 (clamped: w is then within 2e-4 of 1), and outputs so small that their ratio says nothing
(named, for the caller to compute in another way).
"""

from collections.abc import Callable

import torch
from torch import Tensor

_MARGIN = 4.0
# A sink so low that the softmax does not see it.
_NO_SINK = -1e30
# How far below a sink a row's own LSE may lie: sigma shrinks as exp(-distance), and bf16 and fp32
# keep their relative precision down to 1e-38. (fp16 does not; its layers are left to vLLM.)
_REACH = 44.0
# Root mean square of an output below which its products underflow.
_SMALL = 1e-15


def attend_with_lse(
    attend: Callable[[Tensor], tuple[Tensor, Tensor]], other_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with the LSE that its kernel does not return.

    Args:
        attend: ``attend(sinks [H] bf16) -> (out, out_sink)``, both ``[T, H, D]``: the kernel
            without and with these sinks.
        other_lse: ``[H, T]`` fp32, LSE of the partial that the result will be fused with.

    Returns:
        ``out [T, H, D]``, ``lse [H, T]`` fp32, and ``unknown [H, T]`` bool: entries of lse that the
        outputs could not tell.
    """

    def estimate(highest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Out, its norms, lse and what is too far off, with sinks just above ``highest [H]``."""
        # A NaN (a broken model) must not loop for ever; it comes out of the kernel again.
        sinks = (highest + _MARGIN).nan_to_num(0.0, 0.0, 0.0).to(torch.bfloat16)
        out, out_sink = attend(sinks)
        plain = out.float()
        norm = plain.square().sum(-1).T  # [H, T]
        sigma = (out_sink.float() * plain).sum(-1).T / norm
        sink = sinks.float()[:, None]
        ceiling = 1.0 - torch.finfo(out.dtype).eps
        lse = sink + torch.logit(sigma.clamp_(0.0, ceiling))
        # What is highest is never far, though a sink be rounded far above it: each round ends some.
        far = (sink - other_lse > _REACH) & (other_lse < highest[:, None])
        return out, norm, lse, far

    out, norm, lse, far = estimate(other_lse.amax(1))
    while far.any():
        _, _, again, still_far = estimate(other_lse.masked_fill(~far, -torch.inf).amax(1))
        lse = torch.where(far, again, lse)
        far &= still_far
    return out, lse, norm < out.shape[-1] * _SMALL**2


def give_heads_twice(query: Tensor, num_kv_heads: int) -> Tensor:
    """``[T, Hq, D] -> [T, 2 Hq, D]``: the query heads of each KV head, then the same again."""
    groups = query.unflatten(1, (num_kv_heads, -1))
    return torch.cat([groups, groups], 2).flatten(1, 2)


def sinks_for_both(sinks: Tensor, num_kv_heads: int) -> Tensor:
    """``[Hq] -> [2 Hq]`` for `give_heads_twice`: no sink to speak of, then the sinks."""
    groups = sinks.view(num_kv_heads, -1)
    return torch.cat([torch.full_like(groups, _NO_SINK), groups], 1).flatten()


def part_both(out: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """``[T, 2 Hq, D]`` of both halves -> two views ``[T, Hkv, g, D]`` as ``[T, Hq, D]``."""
    plain, with_sink = out.unflatten(1, (num_kv_heads, 2, -1)).unbind(2)
    return plain.flatten(1, 2), with_sink.flatten(1, 2)
