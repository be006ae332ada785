"""vLLM's FlashAttention over a `Batch`, called as vLLM's backend and as relay's call it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.gpu.batches import Batch


def flash_attention(version: int) -> Callable[..., Any]:
    """vLLM's ``flash_attn_varlen_func`` of FlashAttention `version`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return functools.partial(flash_attn_varlen_func, fa_version=version)


def scheduler() -> Callable[..., Tensor]:
    """vLLM's ``get_scheduler_metadata`` of FlashAttention 3."""
    from vllm.vllm_flash_attn import get_scheduler_metadata

    return get_scheduler_metadata


@dataclass(frozen=True)
class Scheduled:
    """A part of a `Plan` and how FlashAttention 3 is told to split it.

    Attributes:
        metadata: of `schedule`; None for dense keys, which vLLM makes none for.
    """

    part: Any
    splits: int
    metadata: Tensor | None


def schedule(batch: Batch, part: Any, splits: int) -> Scheduled:
    """A part with its schedule, as vLLM's builder makes it in full graphs."""
    metadata = scheduler()(
        batch_size=len(part.seq_lens),
        max_seqlen_q=part.max_query_len,
        max_seqlen_k=part.max_seq_len,
        num_heads_q=batch.q.shape[1],
        num_heads_kv=batch.k_cache.shape[2],
        headdim=batch.q.shape[2],
        cache_seqlens=part.seq_lens,
        qkv_dtype=batch.q.dtype,
        cu_seqlens_q=part.query_start_loc,
        page_size=batch.k_cache.shape[1],
        causal=part.causal,
        window_size=(-1, -1),
        num_splits=splits,
    )
    return Scheduled(part, splits, metadata)


def stock_attention(
    batch: Batch, varlen: Callable[..., Any], out: Tensor, told: Scheduled | None = None
) -> Tensor:
    """The one call of vLLM's backend: every row reads all of its KV.

    Args:
        told: how to split; None leaves it to FlashAttention.
    """
    how = {} if told is None else _how(told)
    return varlen(
        q=batch.q,
        k=batch.k_cache,
        v=batch.v_cache,
        out=out,
        max_seqlen_q=1,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_k=batch.longest,
        seqused_k=batch.seq_lens,
        block_table=batch.block_table,
        causal=True,
        **how,
    )


def _how(told: Scheduled) -> dict[str, Any]:
    return {"num_splits": told.splits, "scheduler_metadata": told.metadata}


def attend_with(varlen: Callable[..., Any]) -> Callable[..., Tensor]:
    """The ``attend`` that `vllm_relay.ops.step.paged.paged_relay` asks for, from a varlen function.

    Parts may be `Scheduled`; others are left to FlashAttention to split.
    """

    def attend(part: Any, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> Tensor:
        how = {}
        if isinstance(part, Scheduled):
            how, part = _how(part), part.part
        if hasattr(part, "key_start_loc"):
            keys = {"cu_seqlens_k": part.key_start_loc}
        else:
            keys = {"seqused_k": part.seq_lens, "block_table": part.block_table}
        return varlen(
            q=q,
            k=k_cache,
            v=v_cache,
            out=out,
            max_seqlen_q=part.max_query_len,
            cu_seqlens_q=part.query_start_loc,
            max_seqlen_k=part.max_seq_len,
            causal=part.causal,
            return_softmax_lse=True,
            **keys,
            **how,
        )[1]

    return attend
