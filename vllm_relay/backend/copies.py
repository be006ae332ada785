"""Row-major copies of shared segments, kept from step to step, and why they are never stale.

The torch kernel for system attention wants dense keys and values; the CPU engine's blocks are
neither dense nor row-major. A copy is made once per segment and layer and reused while it is true:
nothing derived from the contents of blocks may outlive an unbroken reference on those blocks.

A block's contents change when a forward pass writes a slot of it, and each pass is announced to the
metadata builder of its KV cache group with the slots that it will write. So
`SegmentCopies.begin_step` sees every write before it happens. It cuts a copy back to its longest
beginning
  - of which the step writes no slot: a block that is written was freed and given to other tokens;
  - which some row of the step holds in its leading columns, computed: otherwise nobody is left to
    vouch for it.
Between passes the engine zeroes newly allocated blocks and may copy a partly filled block for a
request that goes on in it: both belong to one request, which writes them in the step that follows.
KV connectors write any block between passes; with one configured nothing is copied at all. Ours is
the exception: it writes the blocks of system KVs before the first pass, and after a reset of the
prefix cache once more what they held; no other token is ever written there while they are pinned.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_relay.backend.layout import BlockLayout


@dataclass(eq=False)
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
        """Cut off what this step makes untrue; call it before every forward pass that writes KV.

        Args:
            block_table: ``[R, M]`` int32 of the step's rows.
            computed_blocks: ``[R]`` full blocks that each row had computed before this step.
            written_blocks: ids of the blocks that the step writes to.
        """
        for copy in self._copies:
            ids = copy.block_ids[: block_table.shape[1]]
            same = block_table[:, : len(ids)] == ids
            same &= np.arange(len(ids)) < computed_blocks[:, None]
            held = same.cumprod(axis=1).any(axis=0).sum()
            written = np.isin(ids[:held], written_blocks)
            copy.block_ids = ids[: written.argmax() if written.any() else held]
        self._copies = [copy for copy in self._copies if len(copy.block_ids)]

    def get(
        self, block_ids: np.ndarray, in_use: Collection[SegmentCopy] = ()
    ) -> tuple[SegmentCopy, int] | None:
        """A copy of these blocks, made if need be, or of as many of them as the bound allows.

        Args:
            block_ids: int32, the segment's blocks from the first column on.
            in_use: copies that must not make room for this one.

        Returns:
            A copy and how many of its leading blocks are those asked for; None for not one.
        """
        best, have = None, 0
        for copy in self._copies:
            common = _common_length(copy.block_ids, block_ids)
            if common > have:
                best, have = copy, common
        found = None if best is None else (best, have)
        if have == len(block_ids):
            return found
        kept = [c for c in self._copies if c in in_use]
        room = (self._max_bytes - sum(c.nbytes for c in kept)) // self._bytes_per_block
        count = min(len(block_ids), room)
        if count <= have:
            return found
        # Copies that no group of this step uses make room, oldest first, and at once when the new
        # one holds what they hold.
        spare = [
            c
            for c in self._copies
            if c not in in_use and _common_length(c.block_ids, block_ids[:count]) < len(c.block_ids)
        ]
        nbytes = count * self._bytes_per_block
        while spare and sum(c.nbytes for c in (*kept, *spare)) + nbytes > self._max_bytes:
            spare.pop(0)
        copy = SegmentCopy(block_ids[:count].copy(), nbytes)
        self._copies = [*(c for c in self._copies if c in kept or c in spare), copy]
        return copy, count

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[SegmentCopy]:
        return iter(self._copies)


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading entries are equal."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def written_blocks(slot_mapping: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks that a slot mapping writes to (``-1`` writes nothing)."""
    return np.unique(slot_mapping[slot_mapping >= 0] // block_size)
