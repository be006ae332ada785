"""What the relay builder adds to vLLM's attention metadata of a step on the CPU."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_relay.backend.copies import SegmentCopy


@dataclass(frozen=True)
class GroupStep:
    """Tokens ``[begin, end)`` of the relay order attend to ``blocks`` of ``copy``.

    Without a copy (our own kernels alone) they attend to the segment where it lies.
    """

    begin: int
    end: int
    copy: SegmentCopy | None
    blocks: slice


@dataclass(frozen=True)
class RelayStep:
    """The plan of one step, made once and read by every layer.

    Attributes:
        tokens: int64 ``[N]``, places in the batch of the query tokens of grouped rows, those of
            each group of each level adjacent; None when that is the batch itself, so that nothing
            need be gathered.
        levels: groups in the order of ``tokens``, outermost level first; every token is in a group
            of the first.
        context: vLLM's metadata for the grouped rows, in that order, with their segments cut off.
        heads_twice: ``context`` is for every query head given twice (see `sink_lse`).
        loners: int64, the tokens of rows in no group. rest: vLLM's metadata for them alone; None
            when there are none.
    """

    tokens: torch.Tensor | None
    levels: tuple[tuple[GroupStep, ...], ...]
    context: Any
    heads_twice: bool
    loners: torch.Tensor
    rest: Any
