"""The log-sum-exp of attention from a kernel that returns only the output.

vLLM's CPU kernel is fast, reads every KV layout the engine writes, and returns no LSE. It does take
attention sinks: a sink of logit ``s`` joins the softmax with value zero, so with ``Z = exp(lse)``

    out_sink = out * Z / (Z + exp(s)) = out * sigmoid(lse - s).

A second call, with a sink, gives ``sigma = <out_sink, out> / <out, out>`` and from it
``lse = s + logit(sigma)``.

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

_MARGIN = 4.0
# How far below a sink a row's own LSE may lie. sigma shrinks as exp(-distance): bf16 keeps its
# relative precision, fp16 loses digits below 6e-5.
_REACH = {torch.float16: 6.0}
_DEFAULT_REACH = 44.0
# Root mean square of an output below which its products underflow or, in fp16, have lost their
# digits.
_SMALL = {torch.float16: 4e-3}
_DEFAULT_SMALL = 1e-15


def lse_from_sinks(
    attend: Callable[[torch.Tensor], torch.Tensor], out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """LSE of a partial whose output is known.

    Args:
        attend: ``attend(sinks [H] bf16) -> [T, H, D]``, the kernel with these sinks on the same
            rows.
        out: ``[T, H, D]``, its output without sinks.
        other_lse: ``[H, T]`` fp32, LSE of the partial that ``out`` will be fused with.

    Returns:
        ``lse [H, T]`` fp32, and ``unknown [H, T]`` bool: entries that the ratio could not tell.
    """
    plain = out.float()
    norm = plain.square().sum(-1).T  # [H, T]
    unknown = norm < out.shape[-1] * _SMALL.get(out.dtype, _DEFAULT_SMALL) ** 2
    reach = _REACH.get(out.dtype, _DEFAULT_REACH)
    ceiling = 1.0 - torch.finfo(out.dtype).eps

    def estimate(highest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """LSE with sinks just above ``highest [H]``, and which entries lie too far below them."""
        # A NaN (a broken model) must not loop for ever; it comes out of the kernel again.
        sinks = (highest + _MARGIN).nan_to_num(0.0, 0.0, 0.0).to(torch.bfloat16)
        sink = sinks.float()[:, None]
        sigma = (attend(sinks).float() * plain).sum(-1).T / norm
        return sink + torch.logit(sigma.clamp(0.0, ceiling)), sink - other_lse > reach

    lse, far = estimate(other_lse.amax(1))
    while far.any():
        again, still_far = estimate(other_lse.masked_fill(~far, -torch.inf).amax(1))
        lse = torch.where(far, again, lse)
        far &= still_far
    return lse, unknown
