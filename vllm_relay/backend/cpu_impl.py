"""One layer's relay attention on vLLM's CPU engine: vLLM's own, with the relay path in front."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_relay.backend.copies import SegmentCopies
from vllm_relay.backend.cpu_native import NativeStep, packed
from vllm_relay.backend.layout import BlockLayout, find_layout
from vllm_relay.backend.metadata import RelayStep
from vllm_relay.backend.sink_lse import (
    attend_with_lse,
    give_heads_twice,
    part_both,
    sinks_for_both,
)
from vllm_relay.ops import system_attention
from vllm_relay.ops.cpu import native
from vllm_relay.ops.cpu.fusion import fuse_into
from vllm_relay.ops.system import level_attention


@dataclass
class RelayMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a step that is relayed; other steps carry vLLM's own class."""

    relay: RelayStep | NativeStep | None = None


class RelayImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention of one layer, with the relay path in front of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refusal = self._refusal()
        self._layout: BlockLayout | None = None
        # Why our own kernels do not serve this layer; None where they do.
        self.not_native: str | None = "nothing is known of its KV blocks"
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
            self.not_native = native.unusable(dtype, self.head_size)
            one = torch.empty(1, self.num_kv_heads, block_size, 2 * self.head_size, dtype=dtype)
            if self.not_native is None and self._layout.for_kernels(one) is None:
                self.not_native = "the engine's KV blocks are laid out in an unknown way"
            if dtype == torch.float16 and self.not_native is not None:
                # Its range is too small for `sink_lse`.
                self.refusal = "float16"

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
        if isinstance(step, NativeStep):
            assert self._layout is not None  # or the layer would be refused
            step.run(layer, self._layout, query, kv_cache, output)
            return output
        if step.rest is not None:
            q = query[step.loners]  # for key and value too, see `attend_context`
            rest = torch.empty_like(q)
            output[step.loners] = super().forward(layer, q, q, q, kv_cache, step.rest, rest)
        count = step.context.num_actual_tokens
        mine = query[:count] if step.tokens is None else query[step.tokens]
        outs, lses = self._levels(layer, mine, kv_cache, step)
        context = self.attend_context(
            layer, mine, kv_cache, step.context, step.heads_twice, outs, lses
        )
        fuse_into(output, step.tokens, [*outs, context[0]], [*lses, context[1]])
        return output

    def _levels(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: RelayStep
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """System attention of each level: outs ``[N, Hq, D]``, lses ``[Hq, N]`` in relay order."""
        assert self._layout is not None  # or the layer would be refused
        outs, lses = [], []
        for level in step.levels:
            groups = [
                (
                    group.begin,
                    group.end,
                    *group.copy.rows(layer.layer_name, kv_cache, self._layout, group.blocks),
                )
                for group in level
                if group.copy is not None
            ]
            out, lse = level_attention(query, groups, scale=self.scale)
            outs.append(out)
            lses.append(lse)
        return outs, lses

    def attend_context(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        heads_twice: bool,
        system_outs: list[torch.Tensor],
        system_lses: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The context partial of the grouped rows, from vLLM's kernel: ``[N, Hq, D], [Hq, N]``.

        Args:
            query: ``[N, Hq, D]``. metadata: of the contexts alone. heads_twice: as in `RelayStep`.
            system_outs, system_lses: the other partials, whose size decides how exact it must be.
        """
        with_sinks = copy.copy(self)

        def kernel(impl: RelayImpl, query: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(query)
            # query stands in for key and value, which vLLM's decoder path does not read: they are
            # in the cache already
            return CPUAttentionBackendImpl.forward(
                impl, layer, query, query, query, kv_cache, metadata, out
            )

        def attend(sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not heads_twice:
                with_sinks.sinks = sinks
                return kernel(self, query), kernel(with_sinks, query)
            with_sinks.sinks = sinks_for_both(sinks, self.num_kv_heads)
            twice = give_heads_twice(query, self.num_kv_heads)
            return part_both(kernel(with_sinks, twice), self.num_kv_heads)

        lse_of_all = system_lses[0]
        if len(system_lses) > 1:
            lse_of_all = torch.logsumexp(torch.stack(system_lses), 0)
        out, lse, unknown = attend_with_lse(attend, lse_of_all)
        if unknown.any():
            # A head that is empty in every partial stays empty whatever the weights.
            empty = unknown.clone()
            for system_out, system_lse in zip(system_outs, system_lses, strict=True):
                empty &= ~(system_out.any(-1).T & system_lse.isfinite())
            lse.masked_fill_(empty, -torch.inf)
            unknown &= ~empty
            for token in unknown.any(0).nonzero().flatten().tolist():
                lse[:, token] = self._exact_context_lse(query[token], kv_cache, metadata, token)
        return out, lse

    def _exact_context_lse(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        token: int,
    ) -> torch.Tensor:
        """LSE ``[Hq]`` of one token's context from its row's own blocks, copied row by row."""
        assert self._layout is not None
        starts = metadata.query_start_loc
        row = int(torch.searchsorted(starts, token, right=True)) - 1
        # The row's queries are its last tokens; each sees what comes before it, and itself.
        tokens = int(metadata.seq_lens[row]) - (int(starts[row + 1]) - 1 - token)
        block_size = kv_cache.shape[2]
        blocks = metadata.block_table[row, : -(-tokens // block_size)].tolist()
        keys = kv_cache.new_empty(self.num_kv_heads, len(blocks) * block_size, self.head_size)
        values = torch.empty_like(keys)
        self._layout.copy_rows(kv_cache, blocks, keys, values)
        keys, values = (x[:, :tokens].transpose(0, 1) for x in (keys, values))
        return system_attention(query[None], keys, values, scale=self.scale)[1][:, 0]
