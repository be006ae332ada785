"""System attention on the CPU: torch's own flash kernel, which returns the LSE."""

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _dense_rows(x: Tensor) -> Tensor:
    # The kernel assumes dense channels and answers wrongly, not with an error, where they are not.
    return x if x.stride(-1) == 1 else x.contiguous()


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.system_attention`, checked there; T and S are at least 1."""
    tokens, q_heads, head_size = q.shape
    kv_heads = k.shape[1]
    # [T, Hq, D] -> [1, Hkv, g * T, D]: the query heads of one KV head become rows of one product,
    # so K and V are read once per KV head. Group-major rows keep the way back a view.
    rows = _dense_rows(q).transpose(0, 1).reshape(1, kv_heads, -1, head_size)
    keys = _dense_rows(k).transpose(0, 1).unsqueeze(0)
    values = _dense_rows(v).transpose(0, 1).unsqueeze(0)
    out, lse = _flash(rows, keys, values, scale=scale)
    # lse comes as [1, Hkv, g * T] float32 with the heads innermost in memory.
    return out.reshape(q_heads, tokens, head_size).transpose(0, 1), lse.reshape(q_heads, tokens)
