"""What the relay builder adds to vLLM's attention metadata of a step."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_relay.backend.copies import SegmentCopy


@dataclass(frozen=True)
class GroupStep:
    """One group of a step: rows ``[begin, end)`` of the relay order attend to the first blocks of
    ``copy``.
    """

    begin: int
    end: int
    num_blocks: int
    copy: SegmentCopy


@dataclass(frozen=True)
class RelayStep:
    """The plan of one decode step, made once and read by every layer.

    Attributes:
        rows: int64 ``[N]``, batch row of each grouped request, groups contiguous; None when all
            rows are grouped in batch order, so that nothing need be gathered.
        groups: in the order of ``rows``.
        context: vLLM's metadata for all rows with shared segments cut off; rows in no group keep
            all their blocks.
        grouped: the same for ``rows`` alone, in their order.
    """

    rows: torch.Tensor | None
    groups: tuple[GroupStep, ...]
    context: Any
    grouped: Any
