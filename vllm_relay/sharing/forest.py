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


def check_batch(
    block_table: NDArray[np.int32], lens: NDArray[np.int32], block_size: int, *, lens_name: str
) -> None:
    """Raise ValueError unless block_table is int32 [R, M], lens int32 [R] >= 0, block_size >= 1."""
    if not _is_int32(block_table, 2):
        raise ValueError(f"block_table must be an int32 array [R, M], got {_describe(block_table)}")
    if not _is_int32(lens, 1) or len(lens) != len(block_table):
        expected = f"an int32 array [{len(block_table)}]"
        raise ValueError(f"{lens_name} must be {expected}, got {_describe(lens)}")
    if block_size < 1:
        raise ValueError(f"block_size must be >= 1, got {block_size}")
    if len(lens) and lens.min() < 0:
        raise ValueError(f"{lens_name} must be >= 0, got {int(lens.min())}")


def _is_int32(array: object, ndim: int) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == np.int32 and array.ndim == ndim


def _describe(array: object) -> str:
    if isinstance(array, np.ndarray):
        return f"{array.dtype} {list(array.shape)}"
    return type(array).__name__
