"""Copies of shared segments, kept from step to step, and why they are never stale.

Torch's kernel for system attention wants dense keys and values, which the CPU engine's blocks are
not; our own kernels read blocks, and packed keys and values faster. A copy is made once per segment
and layer and reused while it is true: nothing derived from the contents of blocks may outlive an
unbroken reference on those blocks.

A block's contents change when a forward pass writes a slot of it, and each pass is announced to the
metadata builder of its KV cache group with the slots that it will write. So
`SegmentCopies.begin_step` sees every write before it happens. It cuts a copy back to its longest
beginning
  - of which the step writes no slot: a block that is written was freed and given to other tokens;
  - which some row of the step holds in the columns where its owners did, computed: otherwise nobody
    is left to vouch for it.
Between passes the engine zeroes newly allocated blocks and may copy a partly filled block for a
request that goes on in it: both belong to one request, which writes them in the step that follows.
KV connectors write any block between passes; with one configured nothing is copied at all. Ours is
the exception: it writes the blocks of system KVs before the first pass, and after a reset of the
prefix cache once more what they held; no other token is ever written there while they are pinned.
So no row need hold those: their pin vouches for them.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from vllm_relay.backend.kv_layout import BlockLayout

T = TypeVar("T")


@dataclass(eq=False)
class SegmentCopy:
    """Keys and values of one run of blocks in another form, made layer by layer on first use.

    ``start`` is the column of the first block: its owners hold them there. ``pinned``: it holds
    blocks of a system KV and nothing else, and stays while they are pinned.
    """

    block_ids: np.ndarray
    start: int
    nbytes: int
    pinned: bool = False
    _layers: dict[str, Any] = field(default_factory=dict, repr=False)

    def layer(self, name: str, make: Callable[[], T]) -> T:
        """What this copy holds of the layer of that name; made by ``make`` the first time."""
        if name not in self._layers:
            self._layers[name] = make()
        held: T = self._layers[name]
        return held

    def rows(
        self, name: str, kv_cache: torch.Tensor, layout: BlockLayout, blocks: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some of its blocks in one layer, row by row.

        Args:
            name: the layer's name. kv_cache: its blocks ``[num_blocks, H, block_size, 2 * D]``.
            blocks: from which block of the copy to which.

        Returns:
            Two views ``[tokens of the blocks, H, D]`` in kv_cache's dtype, head-major in memory.
        """
        block_size, dim = kv_cache.shape[2], kv_cache.shape[3] // 2

        def copy() -> tuple[torch.Tensor, torch.Tensor]:
            shape = (kv_cache.shape[1], len(self.block_ids) * block_size, dim)
            keys, values = kv_cache.new_empty(shape), kv_cache.new_empty(shape)
            layout.copy_rows(kv_cache, self.block_ids.tolist(), keys, values)
            return keys, values

        tokens = slice(blocks.start * block_size, blocks.stop * block_size)
        keys, values = self.layer(name, copy)
        return keys[:, tokens].transpose(0, 1), values[:, tokens].transpose(0, 1)


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
        # Blocks that hold pinned system KVs, for good as far as anybody knows.
        self.lasting: set[int] = set()

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
            ids = copy.block_ids
            columns = block_table[:, copy.start : copy.start + len(ids)]
            count = columns.shape[1]
            same = columns == ids[:count]
            same &= copy.start + np.arange(count) < computed_blocks[:, None]
            copy.pinned = copy.pinned and self.lasting.issuperset(ids.tolist())
            held = len(ids) if copy.pinned else same.cumprod(axis=1).any(axis=0).sum()
            written = np.isin(ids[:held], written_blocks)
            copy.block_ids = ids[: written.argmax() if written.any() else held]
        self._copies = [copy for copy in self._copies if len(copy.block_ids)]

    def to_make(
        self, block_ids: np.ndarray, start: int, in_use: Collection[SegmentCopy] = ()
    ) -> int:
        """How many blocks `get` would copy: a longer copy is made anew."""
        found = self.find(block_ids, start)
        have = 0 if found is None else found[1].stop - found[1].start
        return self._fitting(self._new(block_ids, start), have, in_use)

    def _new(self, block_ids: np.ndarray, start: int) -> SegmentCopy:
        pinned = self.lasting.issuperset(block_ids.tolist())
        return SegmentCopy(block_ids.copy(), start, len(block_ids) * self._bytes_per_block, pinned)

    def _fitting(self, new: SegmentCopy, have: int, in_use: Collection[SegmentCopy]) -> int:
        """Blocks that a new copy may hold; 0 where it would hold no more than there is."""
        stay = sum(c.nbytes for c in self._copies if _stays(c, new, in_use))
        count = min(len(new.block_ids), (self._max_bytes - stay) // self._bytes_per_block)
        return count if count > have else 0

    def get(
        self,
        block_ids: np.ndarray,
        start: int,
        in_use: Collection[SegmentCopy] = (),
        make: bool = True,
    ) -> tuple[SegmentCopy, slice] | None:
        """A copy of these blocks, made if need be, or of as many of them as the bound allows.

        Args:
            block_ids: int32, the segment's blocks. start: the column of the first.
            in_use: copies that must not make room for this one.
            make: False: only what is copied already.

        Returns:
            A copy and which of its blocks are the leading ones of those asked for; None for not
            one.
        """
        found = self.find(block_ids, start)
        have = 0 if found is None else found[1].stop - found[1].start
        count = self._fitting(self._new(block_ids, start), have, in_use) if make else 0
        if not count:
            return found
        # Copies that are not in use make room, oldest first, and at once when the new one holds
        # what they hold. Those of system KVs make it only then.
        new = self._new(block_ids[:count], start)
        kept = [c for c in self._copies if _stays(c, new, in_use)]
        spare = [c for c in self._copies if c not in kept and not _holds(new, c)]
        while spare and sum(c.nbytes for c in (*kept, *spare, new)) > self._max_bytes:
            spare.pop(0)
        self._copies = [*(c for c in self._copies if c in kept or c in spare), new]
        return new, slice(0, count)

    def find(self, block_ids: np.ndarray, start: int) -> tuple[SegmentCopy, slice] | None:
        """The copy that holds most of the leading blocks, and where."""
        best, have = None, 0
        for copy in self._copies:
            first = start - copy.start
            if first >= 0:
                common = _common_length(copy.block_ids[first:], block_ids)
                if common > have:
                    best, have = (copy, slice(first, first + common)), common
        return best

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[SegmentCopy]:
        return iter(self._copies)


def _stays(copy: SegmentCopy, new: SegmentCopy, in_use: Collection[SegmentCopy]) -> bool:
    """Whether a copy makes no room for a new one."""
    return copy in in_use or (copy.pinned and not _holds(new, copy))


def _holds(copy: SegmentCopy, other: SegmentCopy) -> bool:
    """Whether every block of the other copy is in this one."""
    first = other.start - copy.start
    count = len(other.block_ids)
    return first >= 0 and np.array_equal(copy.block_ids[first : first + count], other.block_ids)


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading entries are equal."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def written_blocks(slot_mapping: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks that a slot mapping writes to (``-1`` writes nothing)."""
    return np.unique(slot_mapping[slot_mapping >= 0] // block_size)
