"""One layer's relay attention on vLLM's CPU engine: vLLM's own, with the relay path in front."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_relay.backend.cpu_native import NativeStep, packed
from vllm_relay.backend.kv_layout import BlockLayout, find_layout
from vllm_relay.backend.packed_cache import SegmentCopies
from vllm_relay.ops.native import library as native


@dataclass
class RelayMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a step that is relayed; other steps carry vLLM's own class."""

    relay: NativeStep | None = None


class RelayImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention of one layer, with the relay path in front of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refusal = self._refusal()
        self._layout: BlockLayout | None = None
        # Packed segments of the builder that plans for this layer, where it packs any.
        self.copies: SegmentCopies | None = None

    def _refusal(self) -> str | None:
        """What about this layer the split does not cover, or None."""
        checks = (
            (self.attn_type != AttentionType.DECODER, f"{self.attn_type} attention"),
            (self.sliding_window > 0, "a sliding window"),
            (self.alibi_slopes is not None, "ALiBi"),
            (bool(self.logits_soft_cap), "a logits soft cap"),
            (self.sinks is not None, "attention sinks"),
            (self.kv_cache_dtype != "auto", f"a {self.kv_cache_dtype} KV cache"),
        )
        return next((name for applies, name in checks if applies), None)

    def relay(self, wanted: bool) -> None:
        """Put `forward_relayed` in the place of vLLM's ``forward``, or take it away again.

        So a step in which nothing is relayed runs vLLM's own method, without a call in front of it.
        Whichever is called, the output is right: the metadata of a relayed step is vLLM's, too.
        """
        if wanted:
            self.forward = self.forward_relayed
        else:
            self.__dict__.pop("forward", None)

    def prepare(self, layer: Any, block_size: int, dtype: torch.dtype) -> None:
        """Find how the engine lays out this layer's blocks.

        The layer is left to vLLM when that fails.
        """
        if self.refusal is None:
            self._layout = find_layout(
                lambda key, value, cache, slots: self.do_kv_cache_update(
                    layer, key, value, cache, slots
                ),
                self.num_kv_heads,
                block_size,
                self.head_size,
                dtype,
            )
            if self._layout is None:
                self.refusal = "a KV layout that relay cannot read"
                return
            self.refusal = native.unusable(dtype, self.head_size)
            one = torch.empty(1, self.num_kv_heads, block_size, 2 * self.head_size, dtype=dtype)
            if self.refusal is None and self._layout.for_kernels(one) is None:
                self.refusal = "a KV layout that the CPU kernels cannot read"

    def keep(self, layer: Any, kv_cache: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Pack blocks that hold a system KV, from the first on; they stay so until `forget`.

        Where ``max_copy_gib`` has no room for all of them they are read in place.
        """
        if self.copies is None or not block_ids:
            return
        assert self._layout is not None  # or there would be no copies
        cache, blocks = self._layout.for_kernels(kv_cache), np.array(block_ids, dtype=np.int32)
        self.copies.lasting.update(block_ids)
        held = self.copies.find(blocks, 0)
        if held is None or held[1].stop < len(blocks):
            if self.copies.to_make(blocks, 0) < len(blocks):
                return
            held = self.copies.get(blocks, 0)
        assert held is not None and cache is not None
        packed(held[0], layer.layer_name, cache, kv_cache)

    def forget(self) -> None:
        """System KVs may be no more."""
        if self.copies is not None:
            self.copies.lasting.clear()

    def forward_relayed(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As vLLM's: query, output ``[T, Hq, D]``, cache ``[blocks, Hkv, block_size, 2 * D]``.

        `relay` puts it in the place of ``forward``.
        """
        step = attn_metadata.relay if isinstance(attn_metadata, RelayMetadata) else None
        if step is None or self.refusal is not None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        assert self._layout is not None  # or the layer would be refused
        step.run(layer, self._layout, query, kv_cache, output)
        return output
