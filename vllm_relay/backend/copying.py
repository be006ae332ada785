"""When shared segments are copied for PyTorch's CPU kernels, which need them dense, and how far.

A copy costs about as much as some steps with it save, and nobody knows how many will come. It is
made once the steps without it have forgone as much: then waiting and copying cost no more than
twice what was best. A group is run only as far as its segment is copied.
"""

import numpy as np

from vllm_relay import metrics
from vllm_relay.backend.copies import SegmentCopies, SegmentCopy
from vllm_relay.sharing import Choice, Costs, Forest, Group, Segment, predict

# Of each group of each level: a copy and which of its blocks.
Copies = list[list[tuple[SegmentCopy, slice]]]


class Copying:
    """Decides step after step; ``block_size`` in tokens."""

    def __init__(self, block_size: int) -> None:
        self._block = block_size
        # Seconds per layer that groups would have saved for which no copy was made.
        self.forgone = 0.0

    def segments(
        self, choice: Choice, table: np.ndarray, costs: Costs, copies: SegmentCopies
    ) -> tuple[Forest, Copies]:
        """The best of the chosen groups that are copied or are worth it, and their copies.

        Args:
            choice: the step's groups. table: int32 ``[R, M]``, its block tables.
        """
        segments = [
            (table[group.rows[0], group.segment.start : group.segment.end], group.segment.start)
            for level in choice.forest.levels
            for group in level
        ]
        in_use = [copy for x in segments for copy, _ in filter(None, [copies.find(*x)])]
        blocks = sum(copies.to_make(*x, in_use) for x in segments)
        forest, found, cost = _usable(choice, table, costs, copies, in_use)
        if not blocks:
            return forest, found
        price = blocks * self._block * costs.copy
        self.forgone = min(self.forgone + cost - choice.relay, price)
        if self.forgone < price:
            return forest, found
        self.forgone = 0.0
        forest, found, _ = _usable(choice, table, costs, copies, in_use, make=True)
        return forest, found


def _usable(
    choice: Choice,
    table: np.ndarray,
    costs: Costs,
    copies: SegmentCopies,
    in_use: list[SegmentCopy],
    make: bool = False,
) -> tuple[Forest, Copies, float]:
    """What can be run of a choice, the copies for it, and its predicted cost.

    Groups are cut to what is copied. That may take longer than nothing, or than without them.
    """
    cut, found, whole = _cut(choice.forest, table, copies, in_use, make)
    if whole:
        return cut, found, choice.relay
    if make:
        metrics.say_once("shared segments are cut to what max_copy_gib allows")
    nothing = Forest((), cut.num_rows, cut.block_size)
    candidates: list[tuple[Forest, Copies, float]] = [(nothing, [], choice.stock)]
    for forest, of_forest in (
        (cut, found),
        _cut(choice.forest, table, copies, in_use, make=False, only_whole=True)[:2],
    ):
        candidates.append((forest, of_forest, predict(forest, choice.shape, costs)))
    return min(candidates, key=lambda candidate: candidate[2])


def _cut(
    forest: Forest,
    table: np.ndarray,
    copies: SegmentCopies,
    in_use: list[SegmentCopy],
    make: bool,
    only_whole: bool = False,
) -> tuple[Forest, Copies, bool]:
    """A forest as far as its segments are copied, its copies, and whether nothing is cut."""
    levels: list[tuple[Group, ...]] = []
    of_levels: Copies = []
    uncut = set(range(forest.num_rows))  # rows all of whose segments so far are whole
    everything = True
    for level in forest.levels:
        groups: list[Group] = []
        of_level: list[tuple[SegmentCopy, slice]] = []
        still_uncut: set[int] = set()
        for group in level:
            if int(group.rows[0]) not in uncut:
                continue
            start, count = group.segment.start, group.segment.blocks
            blocks = table[group.rows[0], start : group.segment.end]
            found = copies.get(blocks, start, in_use, make)
            have = 0 if found is None else found[1].stop - found[1].start
            everything &= have == count
            if found is None or (only_whole and have < count):
                continue
            in_use.append(found[0])
            of_level.append(found)
            groups.append(Group(Segment(start, have), group.rows))
            if have == count:
                still_uncut.update(group.rows.tolist())
        if groups:
            levels.append(tuple(groups))
            of_levels.append(of_level)
        uncut = still_uncut
    return Forest(tuple(levels), forest.num_rows, forest.block_size), of_levels, everything
