"""Providers made of FlashAttention: of the package flash-attn, or of any function like its own.

vLLM carries its own build of FlashAttention; the backend registers it with `system_from_varlen` and
`context_from_varlen`, because this package never imports vLLM. Not yet run on a GPU.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_relay.ops import providers
from vllm_relay.ops.providers import Attend

_PACKAGE = "flash_attn"


def system_from_varlen(fn: Callable[..., Any], **kwargs: Any) -> Attend:
    """A provider of system attention from a function like `flash_attn_varlen_func`.

    Args:
        fn: flash_attn's (https://github.com/Dao-AILab/flash-attention) or vLLM's
            (vllm_flash_attn.flash_attn_interface); told apart by their parameters' names.
        kwargs: passed on to every call, such as fa_version=3.
    """
    flag = _lse_flag(fn)

    def system(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        tokens, keys = q.shape[0], k.shape[0]
        result = fn(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=_ends(tokens, q.device),
            cu_seqlens_k=_ends(keys, q.device),
            max_seqlen_q=tokens,
            max_seqlen_k=keys,
            softmax_scale=scale,
            causal=False,
            **flag,
            **kwargs,
        )
        return result[0], _checked(result[1], q)

    return system


def context_from_varlen(fn: Callable[..., Any], **kwargs: Any) -> Attend:
    """A provider of context attention from a function like `flash_attn_varlen_func`.

    Arguments as `system_from_varlen`. Key lengths go to seqused_k where fn has it (vLLM's), else as
    sums to cu_seqlens_k (flash_attn's). No sync.
    """
    flag = _lse_flag(fn)
    takes_lengths = "seqused_k" in inspect.signature(fn).parameters

    def context(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        max_query_len: int,
        max_context_len: int,
    ) -> tuple[Tensor, Tensor]:
        if max_query_len == 1 and q.shape[0] != context_lens.shape[0]:
            # FlashAttention 2 takes a maximum of 1 to mean one query in every row.
            max_query_len = 2
        lens = context_lens.int().contiguous()
        if takes_lengths:
            lengths = {"seqused_k": lens}
        else:
            sums = torch.cumsum(lens, 0, dtype=torch.int32)
            lengths = {"cu_seqlens_k": torch.nn.functional.pad(sums, (1, 0))}
        result = fn(
            q=q,
            k=k_cache,
            v=v_cache,
            cu_seqlens_q=query_start_loc.int().contiguous(),
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_context_len,
            softmax_scale=scale,
            causal=True,
            block_table=_dense_columns(block_table),
            **lengths,
            **flag,
            **kwargs,
        )
        return result[0], _negative(_checked(result[1], q))

    return context


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """System attention by `flash_attn_with_kvcache`, which splits keys over idle processors."""
    out, lse = providers.module(_PACKAGE).flash_attn_with_kvcache(
        q[None], k[None], v[None], softmax_scale=scale, causal=False, return_softmax_lse=True
    )
    return out[0], _checked(lse[0], q)


def context_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    max_query_len: int,
    max_context_len: int,
) -> tuple[Tensor, Tensor]:
    """Context attention by flash_attn: `flash_attn_with_kvcache` if all rows have as many queries.

    Else `flash_attn_varlen_func`, which takes any lengths but does not split keys.
    """
    package = providers.module(_PACKAGE)
    rows = context_lens.shape[0]
    if q.shape[0] != rows * max_query_len:
        return context_from_varlen(package.flash_attn_varlen_func)(
            q,
            k_cache,
            v_cache,
            block_table,
            context_lens,
            query_start_loc,
            scale,
            max_query_len,
            max_context_len,
        )
    out, lse = package.flash_attn_with_kvcache(
        q.view(rows, max_query_len, *q.shape[1:]),
        k_cache,
        v_cache,
        cache_seqlens=context_lens.int().contiguous(),
        block_table=_dense_columns(block_table),
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
    )
    # [R, Hq, n] -> [Hq, T]
    lse = lse.transpose(0, 1).reshape(q.shape[1], -1)
    return out.reshape(q.shape), _negative(_checked(lse, q))


def system_usable(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the package cannot take these tensors, or None."""
    return providers.not_flash(q, k, v) or providers.missing(_PACKAGE)


def context_usable(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why the package cannot take these tensors, or None; its KV blocks are multiples of 256."""
    return providers.not_flash(q, k_cache, v_cache, 256) or providers.missing(_PACKAGE)


def _lse_flag(fn: Callable[..., Any]) -> dict[str, bool]:
    # vLLM's has both names, and means a debugging aid by the second.
    names = inspect.signature(fn).parameters
    for name in ("return_softmax_lse", "return_attn_probs"):
        if name in names:
            return {name: True}
    raise ValueError(f"fn: {fn} cannot return the LSE")


def _ends(n: int, device: torch.device) -> Tensor:
    # [0, n] written by the device itself; a copy from the host would wait.
    return torch.arange(0, n + 1, n, dtype=torch.int32, device=device)


def _dense_columns(block_table: Tensor) -> Tensor:
    table = block_table.int()
    return table if table.stride(-1) == 1 else table.contiguous()


def _checked(lse: Tensor, q: Tensor) -> Tensor:
    """`lse` if it is [Hq, T]: releases of flash_attn before 2.7 returned another layout."""
    if lse.shape != (q.shape[1], q.shape[0]):
        raise ValueError(
            f"FlashAttention returned an LSE of shape {tuple(lse.shape)}, not [Hq, T] = "
            f"{(q.shape[1], q.shape[0])}; flash-attn 2.7 or later is needed"
        )
    return lse


def _negative(lse: Tensor) -> Tensor:
    # FlashAttention 2 writes +inf for a query that sees nothing.
    return lse.masked_fill_(lse == torch.inf, -torch.inf)
