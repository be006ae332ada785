"""Packed segments kept from step to step: when they are made, and why they are never stale.

**When.** The CPU kernels read KV blocks in place, and packed segments faster. The number of steps
to come is unknown. So a segment is packed once the regret, what steps would have gained from it,
has reached the time of packing: waiting and packing then cost at most twice the best. A step packs
one segment, so that none waits for the packing of several. System KVs are packed when they are
loaded and stay while they are pinned.

**Never stale** (contract 2). A block's contents change when a forward pass writes a slot of it, and
each pass is announced to the metadata builder of its KV cache group with the slots that it will
write. So `PackedCache.begin_step` sees every write before it happens. It cuts a segment back to its
longest beginning
  - of which the step writes no slot: a block that is written was freed and given to other tokens;
  - which some request of the step holds in the columns where its owners did, computed: otherwise
    nobody is left to vouch for it.
Between passes the engine zeroes newly allocated blocks and may copy a partly filled block for a
request that goes on in it: both belong to one request, which writes them in the step that follows.
KV connectors load KV between passes, into blocks that a request was given since the last step. With
one configured, the computed blocks that such requests alone hold count as written. Ours is the
exception: it writes the blocks of system KVs before the first pass and, after a reset of the
prefix cache, the same contents again. Their pin vouches for them while no request holds them.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_relay.ops.native.packed import PackedSegment
from vllm_relay.sharing import Choice, Costs, Group, blocks_of

Int32Array = NDArray[np.int32]


@dataclass(eq=False)
class Segment:
    """Some KV blocks packed, layer by layer on first use.

    Attributes:
        block_ids: int32. start: column of the first block in its owners' tables.
        pinned: True if it holds blocks of a pinned system KV and nothing else.
    """

    block_ids: Int32Array
    start: int
    nbytes: int
    pinned: bool
    _layers: dict[str, PackedSegment] = field(default_factory=dict, repr=False)

    def layer(self, name: str, pack: Callable[[Int32Array], PackedSegment]) -> PackedSegment:
        """The packed keys and values of one layer; ``pack`` makes them the first time."""
        if name not in self._layers:
            self._layers[name] = pack(self.block_ids)
        return self._layers[name]

    def holds(self, block_ids: Int32Array, start: int) -> bool:
        """True if all of these blocks, from this column on, are in the segment."""
        first = start - self.start
        held = self.block_ids[first : first + len(block_ids)]
        return first >= 0 and np.array_equal(held, block_ids)


# A packed segment, and where in it, in blocks, the one that was asked for begins.
Found = tuple[Segment, int]


class PackedCache:
    """The packed segments of one KV cache group, bounded in bytes.

    Args:
        bytes_per_block: keys and values of one block over all layers of the group.

    Attributes:
        max_bytes: bound for all segments.
    """

    def __init__(self, bytes_per_block: int, max_bytes: int) -> None:
        self._bytes_per_block = bytes_per_block
        self.max_bytes = max_bytes
        self._segments: list[Segment] = []
        self._pinned: set[int] = set()
        # Seconds per layer that steps would have gained from segments that were not packed.
        self._regret = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the segments once every layer is packed."""
        return sum(segment.nbytes for segment in self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def begin_step(
        self, block_table: Int32Array, computed_blocks: Int32Array, written: NDArray[np.int64]
    ) -> None:
        """Cut off what this step makes untrue; called before every forward pass that writes KV.

        Args:
            block_table: ``[R, M]``, of the step's requests.
            computed_blocks: ``[R]``, full blocks of each request computed before this step.
            written: ids of the blocks that the step writes to.
        """
        rewritten = set(written.tolist())
        for segment in self._segments:
            ids = segment.block_ids
            columns = block_table[:, segment.start : segment.start + len(ids)]
            count = columns.shape[1]
            same = columns == ids[:count]
            same &= segment.start + np.arange(count) < computed_blocks[:, None]
            segment.pinned = segment.pinned and self._pinned.issuperset(ids.tolist())
            whole = count == len(ids) and same.all(axis=1).any()  # in nearly every step
            if not (segment.pinned or whole):
                ids = ids[: same.cumprod(axis=1).any(axis=0).sum()]
            if not rewritten.isdisjoint(ids.tolist()):
                ids = ids[: np.isin(ids, written).argmax()]
            segment.block_ids = ids
        self._segments = [segment for segment in self._segments if len(segment.block_ids)]

    def loaded(
        self, block_table: Int32Array, computed_blocks: Int32Array, new: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Blocks that a KV connector may have loaded since the last step.

        Args:
            block_table, computed_blocks: as `begin_step`. new: ``[R]``, see `Continuity.new_rows`.
        """
        computed = np.arange(block_table.shape[1]) < computed_blocks[:, None]
        held = block_table[computed & ~new[:, None]]
        held = np.append(held, np.array(list(self._pinned), held.dtype))
        return np.setdiff1d(block_table[computed & new[:, None]], held).astype(np.int64)

    def pin(self, block_ids: Int32Array) -> Segment | None:
        """The segment of a system KV's blocks, from column 0 on; None where there is no room."""
        self._pinned.update(block_ids.tolist())
        found = self.find(block_ids, 0) or self._add(block_ids, 0, ())
        return found[0] if found else None

    def unpin(self) -> None:
        """Treat system KVs as other segments from the next step on."""
        self._pinned.clear()

    def clear(self) -> None:
        """Forget all segments, those of system KVs too."""
        self._segments.clear()
        self._pinned.clear()

    def of_step(self, choice: Choice, block_table: Int32Array, costs: Costs) -> list[Found | None]:
        """The packed segment of each group, level by level; a new one where it is due.

        Args:
            choice: the step's groups. block_table: int32 ``[R, M]`` of its requests.
        """
        groups = [group for level in choice.forest.levels for group in level]
        blocks = [blocks_of(group, block_table) for group in groups]
        found = [self.find(b, g.segment.start) for g, b in zip(groups, blocks, strict=True)]
        missing = [index for index, held in enumerate(found) if held is None]
        size = choice.forest.block_size
        loose = [i for i in missing if not self._pinned.issuperset(blocks[i].tolist())]
        prices = {i: costs.copy * size * len(blocks[i]) for i in loose}
        price = sum(prices.values())
        gain = sum(_gain(groups[index], choice, costs) for index in missing)
        self._regret = min(self._regret + gain, price)
        if missing and self._regret >= price:
            in_use = [held[0] for held in found if held is not None]
            for index in missing:
                found[index] = new = self._add(blocks[index], groups[index].segment.start, in_use)
                in_use += [new[0]] if new else []
                if new and prices.get(index):
                    self._regret -= prices[index]  # the others are due in the next step
                    break
            else:
                self._regret = 0.0
        return found

    def find(self, block_ids: Int32Array, start: int) -> Found | None:
        """The segment that holds these blocks, from column ``start`` on, and where."""
        for segment in self._segments:
            if segment.holds(block_ids, start):
                return segment, start - segment.start
        return None

    def _add(self, block_ids: Int32Array, start: int, in_use: Collection[Segment]) -> Found | None:
        """A new segment of these blocks, whole; None where it has no room beside those that stay.

        Segments neither in use nor pinned make room, oldest first; those within it go at once.
        """
        nbytes = len(block_ids) * self._bytes_per_block
        pinned = self._pinned.issuperset(block_ids.tolist())
        new = Segment(block_ids.copy(), start, nbytes, pinned)
        inside = [s for s in self._segments if new.holds(s.block_ids, s.start) and s not in in_use]
        spare = [s for s in self._segments if not (s in in_use or s.pinned or s in inside)]
        stay = [s for s in self._segments if s not in inside and s not in spare]
        room = self.max_bytes - nbytes - sum(s.nbytes for s in stay)
        if room < 0:
            return None
        while sum(s.nbytes for s in spare) > room:
            spare.pop(0)
        self._segments = [*(s for s in self._segments if s in stay or s in spare), new]
        return new, 0


def _gain(group: Group, choice: Choice, costs: Costs) -> float:
    """Seconds per layer that a step gains from this group's segment being packed."""
    system, packed = costs.system, costs.packed or costs.system
    tokens = group.segment.blocks * choice.forest.block_size
    queries = float(choice.shape.query_lens[group.rows].sum())
    gain = (system.first - packed.first) + (system.pair - packed.pair) * queries
    return max(gain * tokens, 0.0)


def written_blocks(slot_mapping: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Blocks that a slot mapping writes to (``-1`` writes nothing), once for each slot."""
    return slot_mapping[slot_mapping >= 0] // block_size
