"""Both attention ops by FlashAttention: the package flash-attn, or any function like its own.

vLLM carries its own build of FlashAttention. The backend registers it as `Varlen`, because this
package never imports vLLM.
"""

import inspect
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vllm_relay.ops.attention import providers
from vllm_relay.ops.attention.providers import PagedContext

_PACKAGE = "flash_attn"


def unusable(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the package cannot take these tensors, or None; its KV blocks are multiples of 256."""
    return providers.not_flash(q, k, v, 256) or providers.missing(_PACKAGE)


def system_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """System attention by `flash_attn_with_kvcache`, which splits keys over idle processors."""
    out, lse = providers.module(_PACKAGE).flash_attn_with_kvcache(
        q[None], k[None], v[None], softmax_scale=scale, causal=False, return_softmax_lse=True
    )
    return out[0], _checked(lse[0], q)


def context_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
) -> tuple[Tensor, Tensor]:
    """Context attention by `flash_attn_with_kvcache` if all requests have as many queries.

    Else by `flash_attn_varlen_func`, which takes any lengths but does not split keys.
    """
    package = providers.module(_PACKAGE)
    rows = context.context_lens.shape[0]
    if q.shape[0] != rows * context.max_query_len:
        varlen = Varlen(lambda: package.flash_attn_varlen_func)
        return varlen.context_attention(q, k_cache, v_cache, context, scale)
    out, lse = package.flash_attn_with_kvcache(
        q.view(rows, context.max_query_len, *q.shape[1:]),
        k_cache,
        v_cache,
        cache_seqlens=context.context_lens.int().contiguous(),
        block_table=context.block_table.int().contiguous(),
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
    )
    # [R, Hq, n] -> [Hq, T]
    lse = lse.transpose(0, 1).reshape(q.shape[1], -1)
    return out.reshape(q.shape), _negative(_checked(lse, q))


class Varlen:
    """A provider made from a function like `flash_attn_varlen_func`; no sync.

    Args:
        load: returns the function; called on first use. It is flash_attn's
            (https://github.com/Dao-AILab/flash-attention) or vLLM's
            (vllm_flash_attn.flash_attn_interface); told apart by their parameters' names.
        block_multiple: tokens that a KV block is a multiple of.
    """

    def __init__(self, load: Callable[[], Callable[..., Any]], block_multiple: int = 1) -> None:
        self._load = load
        self._block_multiple = block_multiple

    @cached_property
    def _fn(self) -> tuple[Callable[..., Any], Collection[str]]:
        """The function and the names of its parameters."""
        fn = self._load()
        return fn, inspect.signature(fn).parameters

    def unusable(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why FlashAttention cannot take these tensors, or None."""
        return providers.not_flash(q, k, v, self._block_multiple)

    def system_attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Arguments as `vllm_relay.ops.system_attention`, checked there."""
        tokens, keys = q.shape[0], k.shape[0]
        return self._call(
            q,
            k,
            v,
            cu_seqlens_q=_ends(tokens, q.device),
            cu_seqlens_k=_ends(keys, q.device),
            max_seqlen_q=tokens,
            max_seqlen_k=keys,
            softmax_scale=scale,
            causal=False,
        )

    def context_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Arguments as `vllm_relay.ops.context_attention`, checked there."""
        most = context.max_query_len
        if most == 1 and q.shape[0] != context.context_lens.shape[0]:
            # FlashAttention 2 takes a maximum of 1 to mean one query in every row.
            most = 2
        lens = context.context_lens.int().contiguous()
        lengths = {"seqused_k": lens}
        if "seqused_k" not in self._fn[1]:
            sums = torch.cumsum(lens, 0, dtype=torch.int32)
            lengths = {"cu_seqlens_k": torch.nn.functional.pad(sums, (1, 0))}
        out, lse = self._call(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=context.query_start_loc.int().contiguous(),
            max_seqlen_q=most,
            max_seqlen_k=context.max_context_len,
            softmax_scale=scale,
            causal=True,
            block_table=context.block_table.int().contiguous(),
            **lengths,
        )
        return out, _negative(lse)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        fn, names = self._fn
        # vLLM's has both names, and means a debugging aid by the second.
        for flag in ("return_softmax_lse", "return_attn_probs"):
            if flag in names:
                out, lse, *_ = fn(q=q, k=k, v=v, **options, **{flag: True})
                return out, _checked(lse, q)
        raise ValueError(f"{fn} cannot return the LSE")


def _ends(n: int, device: torch.device) -> Tensor:
    # [0, n] written by the device itself; a copy from the host would wait.
    return torch.arange(0, n + 1, n, dtype=torch.int32, device=device)


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
