"""Attention of one layer on CUDA: vLLM's FlashAttention, with the relay path in front of it.

Not yet run on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from vllm_relay import compat
from vllm_relay.backend import self_test
from vllm_relay.ops.planning.device_plan import DensePart
from vllm_relay.ops.step.paged import PagedStep, paged_relay


@dataclass(frozen=True)
class RelayStep:
    """What the builder adds to a step.

    Attributes:
        paged: its parts are vLLM's metadata, one per call.
        shared: whether something was shared when the host last heard of it, or the step is for a
            graph, which has to be ready for it.
    """

    paged: PagedStep
    shared: bool


@dataclass
class RelayMetadata(FlashAttentionMetadata):
    """vLLM's metadata of the whole step, for the layers that relay leaves to it, and the plan."""

    relay: RelayStep | None = None


class RelayImpl(FlashAttentionImpl):
    """vLLM's FlashAttention of one layer, with the relay path in front of it."""

    # For system attention in graphs; one for all layers, since they run one after another.
    side: "torch.cuda.Stream | None" = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refusal = self._refusal()

    def _refusal(self) -> str | None:
        """What about this layer the split does not cover, or None."""
        checks = (
            (self.attn_type != AttentionType.DECODER, f"{self.attn_type} attention"),
            (tuple(self.sliding_window or (-1, -1)) != (-1, -1), "a sliding window"),
            (self.alibi_slopes is not None, "ALiBi"),
            (self.sinks is not None, "attention sinks"),
            (
                self.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
                f"a {self.kv_cache_dtype} KV cache",
            ),
            # Its tables and lengths have to be of whole pages (vLLM 0.33, Blackwell).
            (compat.uses_fa4_hd256(self), "FlashAttention 4 with heads of 256"),
        )
        return next((name for applies, name in checks if applies), None)

    def prepare(self, device: torch.device, **engine: Any) -> None:
        """Try the kernels of this layer's shape; the layer is left to vLLM when they fail.

        Args:
            engine: what `self_test.Case` has to know beside the layer.
        """
        if self.refusal is None:
            case = self_test.Case(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                fa_version=self.vllm_flash_attn_version,
                softcap=float(self.logits_soft_cap),
                **engine,
            )
            failures = self_test.run(case, device)
            if failures:
                self.refusal = f"kernels that fail their self-test ({'; '.join(failures)})"

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As vLLM's: query, output ``[T, Hq, D]``, cache ``[blocks, Hkv, block_size, 2 * D]``."""
        step = attn_metadata.relay if isinstance(attn_metadata, RelayMetadata) else None
        if step is None or not step.shared or self.refusal is not None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        tokens = step.paged.index.shape[1]
        keys, values = (
            canonicalize_singleton_dim_strides(cache)
            for cache in kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        )
        paged_relay(
            query[:tokens],
            keys,
            values,
            step.paged,
            lambda part, q, k, v, out: self._attend(step, part, q, k, v, out),
            out=output[:tokens],
            # Outside of a graph the host would lose more time with it than the GPU could win.
            side=self.side if _capturing(query) else None,
        )
        return output

    def _attend(
        self,
        step: RelayStep,
        part: Any,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """One FlashAttention call over the KV cache; writes out and returns LSE ``[Hq, T]``."""
        if isinstance(part, DensePart):
            where = {
                "cu_seqlens_k": part.key_start_loc,
                "num_splits": step.paged.levels[0].max_num_splits,
            }
        else:
            where = {
                "seqused_k": part.seq_lens,
                "block_table": part.block_table,
                "scheduler_metadata": part.scheduler_metadata,
                "num_splits": part.max_num_splits,
            }
        return flash_attn.flash_attn_varlen_func(
            q=q,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=part.query_start_loc,
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_seq_len,
            softmax_scale=self.scale,
            causal=part.causal,
            softcap=self.logits_soft_cap,
            fa_version=self.vllm_flash_attn_version,
            return_softmax_lse=True,
            **where,
        )[1]


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
