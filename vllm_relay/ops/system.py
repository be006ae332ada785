"""System attention: all the queries of a group against the segment they share.

The queries are treated as rows of one sequence with no mask, so K and V are read once for the
whole group (RelayAttention, arXiv 2402.14808, Alg. 1; Hydragen, arXiv 2402.05099, section 3).
"""

import torch
from torch import Tensor

from vllm_relay.ops import checks, flash_attn, providers, xformers
from vllm_relay.ops.cpu import attention as native
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
        ValueError: a shape, dtype or device does not fit; the message names the argument. Or the
            provider that was forced (`vllm_relay.ops.providers`) cannot take these tensors.
    """
    checks.query(q, 3, "[T, Hq, D]")
    checks.key_value(q, k, v, 3, "[S, Hkv, D]")
    scale = checks.scale_or_default(scale, q.shape[-1])
    # No provider takes an empty size; the CPU kernel divides by it, which ends the process.
    if q.shape[0] == 0 or k.shape[0] == 0:
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        return q.new_zeros(q.shape), lse
    return providers.choose("system", q, k, v).fn(q, k, v, scale)


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


def _triton(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    # Imported here: triton is absent or useless where there is no GPU.
    from vllm_relay.ops.triton import system

    return system.system_attention(q, k, v, scale)


providers.register("system", "native", native.system_attention, native.usable)
providers.register("system", "cpu", cpu_system.system_attention, providers.not_cpu)
providers.register("system", "torch", torch_system_attention)
providers.register("system", "triton", _triton, providers.not_triton)
providers.register("system", "flash-attn", flash_attn.system_attention, flash_attn.system_usable)
providers.register("system", "xformers", xformers.system_attention, xformers.system_usable)
