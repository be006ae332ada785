"""One attention layer on CUDA: its FlashAttention calls, with the relay path in front of vLLM's."""

import copy
from collections.abc import Callable, Sequence
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

from vllm_relay.backend.cuda_graphs import graphs
from vllm_relay.backend.cuda_support import has_fp8, layer_refusal
from vllm_relay.ops.planning.splits import processors_of, system_splits
from vllm_relay.ops.step.paged import paged_relay
from vllm_relay.plan import DensePart, Part, Plan


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
    sinks: Tensor | None,
    window: tuple[int, int],
    fa_version: int,
    scales: Sequence[Tensor] | None = None,
) -> Tensor:
    """One call of vLLM's FlashAttention; an `ops.step.paged.Attend` when the options are bound.

    Args:
        q, out: [T, Hq, D]; out is written. keys, values: [num_blocks, block_size, Hkv, D], for a
            `DensePart` [tokens, Hkv, D].
        scale, softcap: of the scores; softcap 0: none. sinks: [Hq], one more score of each query,
            counted once, in the part that each has: the causal one. window: keys seen before and
            after a query's own, -1 for all; of the causal part. fa_version: 2, 3 or 4.
        scales: of q, keys and values in fp8, scalars or [Hkv]; None: they are not.

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
    if scales is not None:
        # Per sequence and KV head, as vLLM gives them.
        shape = (len(part.query_start_loc) - 1, keys.shape[-2])
        names = ("q_descale", "k_descale", "v_descale")
        where |= {name: x.expand(shape) for name, x in zip(names, scales, strict=True)}
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
        window_size=list(window) if part.causal else [-1, -1],
        softcap=softcap,
        s_aux=sinks if part.causal else None,
        fa_version=fa_version,
        return_softmax_lse=True,
        num_splits=part.num_splits,
        **where,
    )[1]


def copy_builder(builder: FlashAttentionMetadataBuilder) -> FlashAttentionMetadataBuilder:
    """A copy of vLLM's builder, with a schedule buffer of its own."""
    made = copy.copy(builder)
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
        self._levels = [copy_builder(builder) for _ in range(levels)]
        for made in self._levels:
            made.aot_sliding_window = (-1, -1)
        self._context = copy_builder(builder)
        self._most = builder.max_num_splits
        self._processors = processors_of(builder.device)

    def add(self, plan: Plan[Tensor], common: CommonAttentionMetadata) -> Plan[Tensor]:
        """The plan with the splits and schedule of each call of the step ``common``."""
        context = self._context
        splits = system_splits(
            plan.index.shape[1],
            context.num_heads_q,
            context.num_heads_kv,
            self._processors,
            self._most,
        )
        for builder in self._levels:
            builder.max_num_splits = splits
        levels = [
            _scheduled(builder, part, common)
            for builder, part in zip(self._levels, plan.levels, strict=True)
        ]
        return replace(
            plan,
            levels=levels,
            context=_scheduled(context, plan.context, common),
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
                self._relay(layer, plan, query, kv_cache, output)
                graphs.note_relay()
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

    def _relay(
        self, layer: Any, plan: Plan[Tensor], query: Tensor, kv_cache: Tensor, output: Tensor
    ) -> None:
        tokens = plan.index.shape[1]
        keys, values = (
            canonicalize_singleton_dim_strides(cache)
            for cache in kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        )
        options: dict[str, Any] = {
            "scale": self.scale,
            "softcap": self.logits_soft_cap,
            "sinks": self.sinks,
            "window": self.sliding_window,
            "fa_version": self.vllm_flash_attn_version,
        }
        if has_fp8(self):
            keys, values = (cache.view(torch.float8_e4m3fn) for cache in (keys, values))
            options["scales"] = (layer._q_scale, layer._k_scale, layer._v_scale)
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
