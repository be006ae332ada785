"""System attention: all the queries of a group against the segment they share.

The queries are treated as rows of one sequence with no mask, so K and V are read once for the
whole group (RelayAttention, arXiv 2402.14808, Alg. 1; Hydragen, arXiv 2402.05099, section 3).
"""

import torch
from torch import Tensor

from vllm_relay.ops import checks
from vllm_relay.ops.cpu import system as cpu_system


def system_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Unmasked attention of every query to every key.

    Args:
        q: [T, Hq, D], bf16, fp16 or fp32.
        k, v: [S, Hkv, D], q's dtype, any strides; Hkv divides Hq (MHA, GQA, MQA). A last dim
            that is not dense costs a copy.
        scale: multiplies the scores; D ** -0.5 where None.

    Returns:
        out [T, Hq, D] in q's dtype and lse [Hq, T] float32, natural logarithm. Either may be a
        strided view. With S = 0, out is 0 and lse is -inf.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    checks.query(q, 3, "[T, Hq, D]")
    checks.key_value(q, k, v, 3, "[S, Hkv, D]")
    scale = checks.scale_or_default(scale, q.shape[-1])
    # The CPU kernel divides by both sizes: an empty one ends the process.
    if q.shape[0] == 0 or k.shape[0] == 0:
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        return q.new_zeros(q.shape), lse
    if q.device.type == "cpu":
        return cpu_system.system_attention(q, k, v, scale)
    return torch_system_attention(q, k, v, scale)


def torch_system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same on any device in plain torch and float32; holds Hq * T * S scores at once."""
    tokens, q_heads, head_size = q.shape
    kv_heads = k.shape[1]
    # [T, Hq, D] -> [Hkv, g * T, D]: the query heads of one KV head become rows of one product.
    rows = q.transpose(0, 1).reshape(kv_heads, -1, head_size).float()
    scores = torch.bmm(rows * scale, k.permute(1, 2, 0).float())
    lse = torch.logsumexp(scores, -1)
    out = torch.bmm(scores.sub_(lse.unsqueeze(-1)).exp_(), v.transpose(0, 1).float())
    out = out.reshape(q_heads, tokens, head_size).transpose(0, 1).to(q.dtype)
    return out, lse.reshape(q_heads, tokens)
