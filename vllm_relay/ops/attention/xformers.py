"""System attention by xformers: `memory_efficient_attention_partial`, attention with its LSE."""

from torch import Tensor

from vllm_relay.ops.attention import providers

_FMHA = "xformers.ops.fmha"


def unusable(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why xformers cannot take these tensors, or None."""
    reason = providers.not_flash(q, k, v) or providers.missing(_FMHA)
    # Also a build without the package mslk, from 0.0.35 on.
    if not reason and not hasattr(providers.module(_FMHA), "memory_efficient_attention_partial"):
        reason = "this xformers has no memory_efficient_attention_partial"
    return reason


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Arguments as `vllm_relay.ops.system_attention`, checked there."""
    kv_heads = k.shape[1]
    # xformers writes GQA as [1, T or S, Hkv, g, D].
    grouped = q.unflatten(1, (kv_heads, -1))[None]
    keys, values = (x[None, :, :, None].expand(-1, -1, -1, grouped.shape[3], -1) for x in (k, v))
    out, lse = providers.module(_FMHA).memory_efficient_attention_partial(
        grouped, keys, values, scale=scale
    )
    tokens, heads, _ = q.shape
    # [1, Hkv, g, T]; some operators pad T.
    if lse.shape[0] != 1 or lse.dim() != 4 or lse.shape[-1] < tokens:
        raise ValueError(f"xformers returned an LSE of shape {tuple(lse.shape)}")
    return out.reshape(q.shape), lse[0, :, :, :tokens].reshape(heads, tokens).float()
