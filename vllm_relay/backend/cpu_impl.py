"""One layer's attention on vLLM's CPU engine: vLLM's own, with our kernels in front."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_relay.backend import scrub
from vllm_relay.backend.kv_layout import BlockLayout, find_layout
from vllm_relay.backend.packed_cache import Found, PackedCache, Segment
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.packed import PackedSegment
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.ops.step.native import NativeStep


@dataclass(frozen=True, eq=False)
class RelayStep:
    """One step, laid out once and run by every layer of one shape; true until the next is planned.

    Attributes:
        segments: packed segments that `attention` reads, in its order.
        scrubbed: the layer that is compared with vLLM's own, or None.
    """

    attention: NativeStep
    segments: Sequence[Found]
    scrubbed: "RelayImpl | None" = None


@dataclass
class RelayMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a step that our kernels run; other steps carry vLLM's own class.

    Attributes:
        relay: by the shape of layers; a shape that is not there runs vLLM's own attention.
    """

    relay: Mapping[AttentionShape, RelayStep] = field(default_factory=dict)


class RelayImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention of one layer, with our kernels in front of it.

    Attributes:
        refusal: what about this layer the kernels do not cover; None where they run it.
        shape: its attention; None where it is refused.
        packed: the packed segments of the builder that plans for this layer.
        failed: its `RelayMetadataBuilder.failed`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refusal = self._refusal()
        self.shape: AttentionShape | None = None
        self.packed: PackedCache | None = None
        self.failed: Callable[[str, Exception], None] | None = None
        self._layout: BlockLayout | None = None
        # The layer's KV cache as the kernels read it, and the address and shape it was made for.
        self._kernel_layout: tuple[tuple[int, torch.Size], native.Layout] | None = None

    def _refusal(self) -> str | None:
        kind = AttentionType(self.attn_type)
        checks = (
            (kind != AttentionType.DECODER, f"{kind.value} attention"),
            (self.kv_cache_dtype != "auto", f"a {self.kv_cache_dtype} KV cache"),
        )
        return next((name for applies, name in checks if applies), None)

    def relay(self, wanted: bool) -> None:
        """Put `forward_relayed` in the place of vLLM's ``forward``, or take it away again.

        A step that our kernels do not run has vLLM's own method, without a call in front of it.
        Either gives the right output: the metadata of our steps is vLLM's, too.
        """
        if wanted:
            self.forward = self.forward_relayed
        else:
            self.__dict__.pop("forward", None)

    def prepare(self, layer: Any, block_size: int, dtype: torch.dtype) -> None:
        """Find how the engine lays out this layer's KV blocks; a failure is a `refusal`."""
        if self.refusal is not None:
            return
        self.refusal = native.unusable(dtype, self.head_size)
        if self.refusal is not None:
            return
        self._layout = find_layout(
            lambda key, value, cache, slots: self.do_kv_cache_update(
                layer, key, value, cache, slots
            ),
            self.num_kv_heads,
            block_size,
            self.head_size,
            dtype,
        )
        one = torch.empty(1, self.num_kv_heads, block_size, 2 * self.head_size, dtype=dtype)
        if self._layout is None or self._layout.for_kernels(one) is None:
            self.refusal = "KV blocks in an unknown layout"
            return
        self.shape = AttentionShape(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=dtype,
            scale=self.scale,
            softcap=float(self.logits_soft_cap),
            window=max(self.sliding_window, 0),
        )

    def kernel_layout(self, kv_cache: torch.Tensor) -> native.Layout:
        """The KV cache ``[blocks, Hkv, block_size, 2 * D]`` of a relayed layer for the kernels."""
        address = kv_cache.data_ptr(), kv_cache.shape
        if self._kernel_layout is None or self._kernel_layout[0] != address:
            assert self._layout is not None  # or the layer would be refused
            layout = self._layout.for_kernels(kv_cache)
            assert layout is not None
            self._kernel_layout = address, layout
        return self._kernel_layout[1]

    def pack(self, layer: Any, kv_cache: torch.Tensor, segment: Segment) -> PackedSegment:
        """A segment's packed keys and values of this layer; packed the first time."""
        return segment.layer(layer.layer_name, lambda ids: self._pack(kv_cache, ids))

    def _pack(self, kv_cache: torch.Tensor, block_ids: NDArray[np.int32]) -> PackedSegment:
        layout = self.kernel_layout(kv_cache)
        return PackedSegment(layout, self.num_kv_heads, self.head_size, kv_cache.dtype, block_ids)

    def keep(self, layer: Any, kv_cache: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Pack a system KV's blocks, from column 0 on; they stay packed until `forget`.

        Where ``max_copy_gib`` has no room for all of them they are read in place.
        """
        if self.packed is None or self.failed is None or not block_ids:
            return
        try:
            segment = self.packed.pin(np.array(block_ids, dtype=np.int32))
            if segment is not None:
                self.pack(layer, kv_cache, segment)
        except Exception as error:
            self.failed("packing", error)

    def forget(self) -> None:
        """Unpin system KVs: their blocks may hold something else from now on."""
        if self.packed is None or self.failed is None:
            return
        try:
            self.packed.unpin()
        except Exception as error:
            self.failed("packing", error)  # which forgets all packed segments

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
        """As vLLM's: query, output ``[T, Hq, D]``, cache ``[blocks, Hkv, block_size, 2 * D]``."""
        step = None
        if isinstance(attn_metadata, RelayMetadata) and self.shape is not None:
            step = attn_metadata.relay.get(self.shape)
        scaled = any(x is not None for x in (*args, *kwargs.values()))  # a quantized output
        if step is not None and not scaled:
            try:
                for name, tensor in (("queries", query), ("outputs", output)):
                    if tensor.dtype != kv_cache.dtype:
                        raise TypeError(f"{tensor.dtype} {name} of a {kv_cache.dtype} KV cache")
                segments = [
                    self.pack(layer, kv_cache, segment).from_token(first * kv_cache.shape[2])
                    for segment, first in step.segments
                ]
                # Weights may be loaded again in place, so that sinks are not kept as float32.
                step.attention.run(
                    query,
                    self.kernel_layout(kv_cache),
                    segments,
                    output,
                    slopes=self.alibi_slopes,
                    sinks=None if self.sinks is None else self.sinks.float().contiguous(),
                )
                if step.scrubbed is self:
                    own = torch.empty_like(output)
                    super().forward(layer, query, key, value, kv_cache, attn_metadata, own)
                    assert attn_metadata is not None
                    tokens = attn_metadata.num_actual_tokens
                    self._scrub(layer, kv_cache, step, output[:tokens], own[:tokens])
                return output
            except Exception as error:
                assert self.failed is not None and isinstance(attn_metadata, RelayMetadata)
                attn_metadata.relay = {}  # the other layers of the step
                self.failed("attention", error)
        # The metadata of our steps is vLLM's, too.
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )

    def _scrub(
        self,
        layer: Any,
        kv_cache: torch.Tensor,
        step: RelayStep,
        output: torch.Tensor,
        own: torch.Tensor,
    ) -> None:
        """Raise ScrubError where a packed block or a row differs from vLLM's."""
        if step.segments:
            segment, _ = random.choice(step.segments)
            at = random.randrange(len(segment.block_ids))
            ids = segment.block_ids[at : at + 1]
            packed, fresh = self.pack(layer, kv_cache, segment), self._pack(kv_cache, ids)
            scrub.compare_block(packed.tensors(), fresh.tensors(), at, int(ids[0]))
        scrub.compare_row(output, own)
