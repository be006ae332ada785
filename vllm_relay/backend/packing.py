"""When a shared segment is packed for our own CPU kernels.

Packing takes about as long as some tens of steps gain from it, and nobody knows how many will come.
It is done once steps have forgone as much: then waiting and packing cost no more than twice what
was best. System KVs stay: they are packed when they are loaded, see `RelayImpl.keep`. Groups are
chosen by what they cost in place, so that each pays before it is packed.
"""

import numpy as np

from vllm_relay.backend.packed_cache import SegmentCopies, SegmentCopy
from vllm_relay.sharing import Choice, Costs, Group

# Of each group of each level of a choice its packed segment; None where it is read in place.
Packed = list[list[tuple[SegmentCopy, slice] | None]]


class Packing:
    """Decides step after step; ``block_size`` in tokens."""

    def __init__(self, block_size: int) -> None:
        self._block = block_size
        # Seconds per layer that steps would have gained from segments that were not packed.
        self.forgone = 0.0

    def segments(
        self, choice: Choice, table: np.ndarray, costs: Costs, copies: SegmentCopies
    ) -> Packed:
        """The packed segments of a step, new ones among them where they are due.

        Args:
            choice: the step's groups. table: int32 ``[R, M]``, its block tables.
        """
        found: Packed = [[None] * len(level) for level in choice.forest.levels]
        in_use: list[SegmentCopy] = []
        missing: list[tuple[int, int, np.ndarray, int]] = []
        gain, passing = 0.0, 0
        for number, level in enumerate(choice.forest.levels):
            for index, group in enumerate(level):
                start = group.segment.start
                blocks = table[group.rows[0], start : group.segment.end]
                held = copies.find(blocks, start)
                if held is not None and held[1].stop - held[1].start == len(blocks):
                    found[number][index] = held
                    in_use.append(held[0])
                else:
                    missing.append((number, index, blocks, start))
                    gain += self._gain(group, choice, costs)
                    if not copies.lasting.issuperset(blocks.tolist()):
                        passing += len(blocks)
        price = costs.copy * self._block * passing
        self.forgone = min(self.forgone + gain, price)
        if missing and self.forgone >= price:
            self.forgone = 0.0
            for number, index, blocks, start in missing:
                # Whole or not at all: a part would make others go for what nobody can use.
                if copies.to_make(blocks, start, in_use) == len(blocks):
                    held = copies.get(blocks, start, in_use)
                    assert held is not None
                    in_use.append(held[0])
                    found[number][index] = held
        return found

    def _gain(self, group: Group, choice: Choice, costs: Costs) -> float:
        """Seconds per layer that a step gains from this group's segment being packed."""
        system, packed = costs.system, costs.packed or costs.system
        tokens = group.segment.blocks * self._block
        queries = float(choice.shape.query_lens[group.rows].sum())
        gain = (system.first - packed.first) * tokens
        return max(gain + (system.pair - packed.pair) * tokens * queries, 0.0)
