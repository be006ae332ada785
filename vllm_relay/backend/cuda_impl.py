"""One attention layer on CUDA: its FlashAttention calls, with the relay path in front of vLLM's."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_relay.backend.cuda_support import layer_refusal
from vllm_relay.ops.step.paged import paged_relay
from vllm_relay.plan import DensePart, Part, Plan

# vLLM's default in graphs, 32, takes fp32 [splits, heads, tokens, head size]. A group's queries
# fill more tiles than one request's, so fewer splits do.
SYSTEM_SPLITS = 16


@dataclass
class RelayMetadata(FlashAttentionMetadata):
    """vLLM's metadata of the whole step, for layers that relay leaves to vLLM, and the plan."""

    plan: Plan[Tensor] | None = None


def attend(
    part: Part[Tensor] | DensePart[Tensor],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    scale: float,
    softcap: float,
    fa_version: int,
) -> Tensor:
    """One call of vLLM's FlashAttention; an `ops.step.paged.Attend` when the options are bound.

    Args:
        q, out: [T, Hq, D]; out is written. keys, values: [num_blocks, block_size, Hkv, D], for a
            `DensePart` [tokens, Hkv, D].
        scale, softcap: of the scores; softcap 0: none. fa_version: 2, 3 or 4.

    Returns:
        LSE [Hq, T] float32.
    """
    where: dict[str, Tensor | None]
    if isinstance(part, DensePart):
        where = {"cu_seqlens_k": part.key_start_loc}
    else:
        where = {
            "seqused_k": part.seq_lens,
            "block_table": part.block_table,
            "scheduler_metadata": part.scheduler_metadata,
        }
    return flash_attn.flash_attn_varlen_func(
        q=q,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=part.query_start_loc,
        max_seqlen_q=part.max_query_len,
        max_seqlen_k=part.max_seq_len,
        softmax_scale=scale,
        causal=part.causal,
        softcap=softcap,
        fa_version=fa_version,
        return_softmax_lse=True,
        num_splits=part.num_splits,
        **where,
    )[1]


def copy_builder(
    builder: FlashAttentionMetadataBuilder, max_splits: int | None = None
) -> FlashAttentionMetadataBuilder:
    """A copy of vLLM's builder, with a schedule buffer of its own and at most so many splits."""
    made = copy.copy(builder)
    if max_splits is not None:
        made.max_num_splits = min(builder.max_num_splits, max_splits)
    buffer = getattr(builder, "scheduler_metadata", None)
    if buffer is not None:
        made.scheduler_metadata = torch.zeros_like(buffer)
    return made


class Schedules:
    """FlashAttention's splits and schedules for the calls of a step, made by vLLM's own builder.

    vLLM's builder makes the metadata of one call. So there is a copy of it per call, which is given
    the call's part as if it were a batch.
    """

    def __init__(self, builder: FlashAttentionMetadataBuilder, levels: int) -> None:
        self._levels = [copy_builder(builder, SYSTEM_SPLITS) for _ in range(levels)]
        self._context = copy_builder(builder)

    def add(self, plan: Plan[Tensor], common: CommonAttentionMetadata) -> Plan[Tensor]:
        """The plan with the splits and schedule of each call of the step ``common``."""
        levels = [
            _scheduled(builder, part, common)
            for builder, part in zip(self._levels, plan.levels, strict=True)
        ]
        return replace(
            plan,
            levels=levels,
            context=_scheduled(self._context, plan.context, common),
            dense=plan.dense and replace(plan.dense, num_splits=levels[0].num_splits),
        )


def _scheduled(
    builder: FlashAttentionMetadataBuilder, part: Part[Tensor], common: CommonAttentionMetadata
) -> Part[Tensor]:
    batch = common.replace(
        query_start_loc=part.query_start_loc,
        seq_lens=part.seq_lens,
        num_reqs=len(part.seq_lens),
        max_query_len=part.max_query_len,
        max_seq_len=part.max_seq_len,
        block_table_tensor=part.block_table,
        causal=part.causal,
    )
    made = FlashAttentionMetadataBuilder.build(builder, 0, batch)
    return replace(part, num_splits=made.max_num_splits, scheduler_metadata=made.scheduler_metadata)


class RelayImpl(FlashAttentionImpl):
    """vLLM's FlashAttention of one layer, with the relay path in front of it.

    Attributes:
        refusal: why the layer stays on vLLM's path, or None.
        side: the stream of system attention in graphs; one for all layers, which run in turn.
        failed: its `RelayMetadataBuilder.failed`.
    """

    side: "torch.cuda.Stream | None" = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refusal = layer_refusal(self)
        self.failed: Callable[[str, Exception], None] | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """vLLM's: query, output ``[T, Hq, D]``, cache ``[blocks, Hkv, block_size, 2 * D]``."""
        plan = attn_metadata.plan if isinstance(attn_metadata, RelayMetadata) else None
        if plan is not None and self.refusal is None:
            try:
                self._relay(plan, query, kv_cache, output)
                return output
            except Exception as error:
                # A capture that failed is no graph; a graph without relay would lack a plan.
                if self.failed is None or _capturing(query):
                    raise
                assert isinstance(attn_metadata, RelayMetadata)
                attn_metadata.plan = None  # the other layers of the step
                self.failed("attention", error)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )

    def _relay(self, plan: Plan[Tensor], query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        tokens = plan.index.shape[1]
        keys, values = (
            canonicalize_singleton_dim_strides(cache)
            for cache in kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        )
        options = {
            "scale": self.scale,
            "softcap": self.logits_soft_cap,
            "fa_version": self.vllm_flash_attn_version,
        }
        paged_relay(
            query[:tokens],
            keys,
            values,
            plan,
            lambda *part: attend(*part, **options),
            out=output[:tokens],
            # Outside a graph the second stream costs the host more than the GPU gains.
            side=self.side if _capturing(query) else None,
        )


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
