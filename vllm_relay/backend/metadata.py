"""What the relay builder adds to vLLM's attention metadata of a step."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_relay.backend.copies import SegmentCopy


@dataclass(frozen=True)
class GroupStep:
    """Rows ``[begin, end)`` of the relay order attend to the first blocks of ``copy``."""

    begin: int
    end: int
    num_blocks: int
    copy: SegmentCopy


@dataclass(frozen=True)
class RelayStep:
    """The plan of one decode step, made once and read by every layer.

    Attributes:
        rows: int64 ``[N]``, batch row of each grouped request, groups contiguous; None when that is
            the batch itself, so that nothing need be gathered.
        groups: in the order of ``rows``.
        context: vLLM's metadata for ``rows``, in their order, with the shared segments cut off.
        heads_twice: ``context`` is for every query head given twice (see `sink_lse`).
        loners: int64, the batch rows that are in no group. rest: vLLM's metadata for them alone;
            None when there are none.
    """

    rows: torch.Tensor | None
    groups: tuple[GroupStep, ...]
    context: Any
    heads_twice: bool
    loners: torch.Tensor
    rest: Any
