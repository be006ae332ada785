"""Segments, groups, levels of disjoint groups, and the forest that they make."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class Segment:
    """Columns ``[start, start + blocks)`` of the block table, both in blocks."""

    start: int
    blocks: int

    @property
    def end(self) -> int:
        return self.start + self.blocks


@dataclass(frozen=True, eq=False)
class Group:
    """A segment with the requests that attend to it: ``rows`` int32, ascending, at least two."""

    segment: Segment
    rows: Int32Array


Level = tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Forest:
    """Levels of disjoint groups, outermost first; no levels means that nothing is shared.

    A group of level i + 1 serves some requests of one group of level i, and its segment starts
    where that one ends, so the segments of a request are consecutive columns from column 0 on. The
    groups of a level are in the order of the groups around them.
    """

    levels: tuple[Level, ...]
    num_rows: int
    block_size: int

    @property
    def num_groups(self) -> int:
        return sum(len(level) for level in self.levels)

    def validate(self) -> None:
        """Check the structure, not whether the blocks are shared: the block table decides that.

        Raises:
            ValueError: the first rule that is broken.
        """
        if self.block_size < 1 or self.num_rows < 0:
            raise ValueError("forest: block_size must be >= 1 and num_rows >= 0")
        parent = np.zeros(self.num_rows, dtype=np.int32)  # one common root above level 0
        end_of = {0: 0}
        for depth, level in enumerate(self.levels):
            if not level:
                raise ValueError(f"forest: level {depth} is empty")
            owner = np.full(self.num_rows, -1, dtype=np.int32)
            last_parent = 0
            for index, group in enumerate(level):
                name = f"forest: level {depth}, group {index}"
                self._validate_group(group, name)
                parents = np.unique(parent[group.rows])
                if len(parents) != 1 or parents[0] < 0:
                    raise ValueError(f"{name}: rows must lie in one group of the level above")
                if parents[0] < last_parent:
                    raise ValueError(f"{name}: groups must be in the order of those around them")
                last_parent = int(parents[0])
                if group.segment.start != end_of[int(parents[0])]:
                    raise ValueError(f"{name}: the segment must start where the one above ends")
                if (owner[group.rows] >= 0).any():
                    raise ValueError(f"{name}: a row is in another group of this level")
                owner[group.rows] = index
            parent = owner
            end_of = {index: group.segment.end for index, group in enumerate(level)}

    def _validate_group(self, group: Group, name: str) -> None:
        rows = group.rows
        if rows.dtype != np.int32 or rows.ndim != 1 or len(rows) < 2:
            raise ValueError(f"{name}: rows must be int32 [>= 2]")
        if rows[0] < 0 or rows[-1] >= self.num_rows or (np.diff(rows) <= 0).any():
            raise ValueError(f"{name}: rows must ascend within [0, {self.num_rows})")
        if group.segment.blocks < 1:
            raise ValueError(f"{name}: a segment has at least one block")
