"""Row-major copies of shared segments, kept from step to step, and why they are never stale.

The torch kernel for system attention wants dense keys and values; the CPU engine's blocks are
neither dense nor row-major. A copy is made once per segment and layer and reused while it is true:
nothing derived from the contents of blocks may outlive an unbroken reference on those blocks.

A block's contents change only when a forward pass writes a slot of it, and each pass is announced
to the metadata builder of its KV cache group with the slots that it will write. So
`SegmentCopies.begin_step` sees every write before it happens. It drops a copy
  - when the step writes any slot of its blocks: they were freed and given to other tokens, and
  - when no row of the step holds exactly its blocks in its leading columns: nobody is left to
    vouch for them.
KV connectors write blocks outside forward passes; with one configured nothing is copied at all.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_relay.backend.layout import BlockLayout


@dataclass
class SegmentCopy:
    """Row-major keys and values of one run of blocks, filled layer by layer on first use."""

    block_ids: np.ndarray
    nbytes: int
    _layers: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def layer(
        self, name: str, kv_cache: torch.Tensor, layout: BlockLayout, num_blocks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``num_blocks`` blocks in one layer.

        Args:
            name: the layer's name. kv_cache: its blocks ``[num_blocks, H, block_size, 2 * D]``.

        Returns:
            Two views ``[num_blocks * block_size, H, D]`` in kv_cache's dtype, head-major in memory.
        """
        block_size, dim = kv_cache.shape[2], kv_cache.shape[3] // 2
        if name not in self._layers:
            shape = (kv_cache.shape[1], len(self.block_ids) * block_size, dim)
            keys, values = kv_cache.new_empty(shape), kv_cache.new_empty(shape)
            layout.copy_rows(kv_cache, self.block_ids.tolist(), keys, values)
            self._layers[name] = keys, values
        keys, values = self._layers[name]
        tokens = num_blocks * block_size
        return keys[:, :tokens].transpose(0, 1), values[:, :tokens].transpose(0, 1)


class SegmentCopies:
    """The copies of one KV cache group, bounded in bytes.

    Args:
        bytes_per_block: keys and values of one block over all layers of the group. max_bytes: bound
            for all copies.
    """

    def __init__(self, bytes_per_block: int, max_bytes: int) -> None:
        self._bytes_per_block = bytes_per_block
        self._max_bytes = max_bytes
        self._copies: list[SegmentCopy] = []

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take once every layer has filled them."""
        return sum(copy.nbytes for copy in self._copies)

    def begin_step(
        self, block_table: np.ndarray, computed_blocks: np.ndarray, written_blocks: np.ndarray
    ) -> None:
        """Drop what this step makes untrue; call it before every forward pass that writes KV.

        Args:
            block_table: ``[R, M]`` int32 of the step's rows. computed_blocks: ``[R]`` full blocks
                that each row had computed before this step. written_blocks: ids of the blocks that
                the step writes to.
        """

        def held(block_ids: np.ndarray) -> bool:
            rows = block_table[computed_blocks >= len(block_ids), : len(block_ids)]
            return bool((rows == block_ids).all(axis=1).any())

        self._copies = [
            copy
            for copy in self._copies
            if held(copy.block_ids) and not np.isin(written_blocks, copy.block_ids).any()
        ]

    def get(self, block_ids: np.ndarray) -> SegmentCopy | None:
        """The copy that begins with these blocks, made if need be; None when it would not fit.

        Args:
            block_ids: int32, the segment's blocks from the first column on.
        """
        count = len(block_ids)
        for copy in self._copies:
            if len(copy.block_ids) >= count and np.array_equal(copy.block_ids[:count], block_ids):
                return copy
        # A longer segment replaces the copies it begins with: they would be held twice otherwise.
        kept = [
            c
            for c in self._copies
            if not np.array_equal(c.block_ids, block_ids[: len(c.block_ids)])
        ]
        nbytes = count * self._bytes_per_block
        if sum(c.nbytes for c in kept) + nbytes > self._max_bytes:
            return None
        copy = SegmentCopy(block_ids.copy(), nbytes)
        self._copies = [*kept, copy]
        return copy

    def __len__(self) -> int:
        return len(self._copies)


def written_blocks(slot_mapping: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks that a slot mapping writes to (``-1`` writes nothing)."""
    return np.unique(slot_mapping[slot_mapping >= 0] // block_size)
