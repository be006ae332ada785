"""What the relay builder adds to vLLM's attention metadata of a step on the CPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_relay.backend.packed_cache import SegmentCopy
from vllm_relay.sharing import RelayPlan


@dataclass(frozen=True)
class Batch:
    """A step as the engine gives it: vLLM's CommonAttentionMetadata, and arrays on its tensors.

    Attributes:
        tables: int32 ``[R, M]``, block tables. lens: int32 ``[R]``, tokens of each row, those of
            this step included. queries: int32 ``[R]``, query tokens of each row.
    """

    common: Any
    tables: np.ndarray
    lens: np.ndarray
    queries: np.ndarray

    @classmethod
    def of(cls, common: Any) -> "Batch":
        rows = common.num_reqs
        return cls(
            common,
            common.block_table_tensor[:rows].numpy(),
            common.seq_lens[:rows].numpy(),
            np.diff(common.query_start_loc[: rows + 1].numpy()),
        )

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """int64: places in the batch of these rows' query tokens, row after row."""
        count = self.queries[rows].astype(np.int64)
        first = self.common.query_start_loc.numpy()[rows]
        ends = count.cumsum()
        return np.repeat(first - (ends - count), count) + np.arange(count.sum())

    def places(self, rows: np.ndarray) -> torch.Tensor | None:
        """`tokens`; None where that is the batch as it stands, so that nothing need be gathered."""
        tokens = self.tokens(rows)
        same = np.array_equal(tokens, np.arange(self.common.num_actual_tokens))
        return None if same else torch.from_numpy(tokens)

    def loners(self, plan: RelayPlan) -> np.ndarray:
        """Rows in no group of a plan."""
        return np.setdiff1d(np.arange(len(self.lens)), plan.rows, assume_unique=True)


@dataclass(frozen=True)
class GroupStep:
    """Tokens ``[begin, end)`` of the relay order attend to ``blocks`` of ``copy``.

    Without a copy (our own kernels alone) they attend to the segment where it lies.
    """

    begin: int
    end: int
    copy: SegmentCopy | None
    blocks: slice


def sequences_of(plan: RelayPlan, queries: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """Of each level: begin and end of adjacent query tokens in the order of the plan, their group.

    The group is -1 for rows that only groups further out hold. ``queries``: int32 ``[R]``, of each
    row of the batch.
    """
    offsets = np.concatenate([[0], queries[plan.rows].cumsum()])
    levels = []
    for level in plan.levels:
        bounds = offsets[level.cu_rows].tolist()
        levels.append(list(zip(bounds[:-1], bounds[1:], level.groups.tolist(), strict=True)))
    return levels
