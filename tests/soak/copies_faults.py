"""Faults planted in the guards of packed segments, as changes of their source."""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm_relay.backend.packed_cache import PackedCache
from vllm_relay.backend.step_planner import StepPlanner


@dataclass(frozen=True)
class Fault:
    """In the source of a method, ``old`` becomes ``new``; ``seed``: of a run that finds it soon."""

    owner: type
    method: str
    old: str
    new: str
    seed: int = 0


_BEGIN = (PackedCache, "begin_step")
FAULTS = {
    "written blocks are not looked at": Fault(
        *_BEGIN, "not rewritten.isdisjoint(ids.tolist())", "False"
    ),
    "requests are not looked at": Fault(*_BEGIN, "not (segment.pinned or whole)", "False"),
    "writes past the step's own tokens are ignored": Fault(
        StepPlanner,
        "plan",
        "common.slot_mapping.numpy()",
        "common.slot_mapping.numpy()[: common.num_actual_tokens]",
        seed=2,
    ),
    "one block too many is computed": Fault(
        StepPlanner,
        "plan",
        "(lens - queries) // self._block_size",
        "1 + (lens - queries) // self._block_size",
        seed=19,
    ),
    "computed blocks are not looked at": Fault(
        *_BEGIN, "< computed_blocks[:, None]", "< np.inf", seed=5
    ),
    "columns are not looked at": Fault(
        *_BEGIN,
        "same = columns == ids[:count]",
        "same = (block_table[:, :, None] == ids[:count]).any(axis=1)",
    ),
    "a request that holds the first block vouches for all": Fault(
        *_BEGIN, "same.cumprod(axis=1).any(axis=0).sum()", "len(ids) * same[:, 0].any()", seed=5
    ),
    "a request that holds a part vouches for all": Fault(
        *_BEGIN, "same.all(axis=1).any()", "same.any()", seed=5
    ),
    "a segment is cut at the last block written": Fault(
        *_BEGIN,
        "np.isin(ids, written).argmax()",
        "len(ids) - 1 - np.isin(ids, written)[::-1].argmax()",
    ),
    "a pin outlives its system KV": Fault(
        *_BEGIN, "segment.pinned and self._pinned.issuperset(ids.tolist())", "segment.pinned"
    ),
    "steps of one request are not looked at": Fault(
        StepPlanner, "plan", "if self.packed:", "if self.packed and len(lens) > 1:"
    ),
    "segments outlive a failed step": Fault(
        PackedCache, "clear", "self._segments.clear()", "pass", seed=6
    ),
    "block ids are the engine's own memory": Fault(
        PackedCache, "_add", "block_ids.copy()", "block_ids", seed=1
    ),
}


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The package with this fault."""
    source = textwrap.dedent(inspect.getsource(getattr(fault.owner, fault.method)))
    assert source.count(fault.old) == 1, f"{fault.method} no longer has {fault.old!r} once"
    made: dict[str, Any] = {}
    exec(source.replace(fault.old, fault.new), vars(sys.modules[fault.owner.__module__]), made)
    with mock.patch.object(fault.owner, fault.method, made[fault.method]):
        yield
