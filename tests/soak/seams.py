"""The seams at which relay may fail, and a failure planted at the n-th call of one of them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from vllm_relay import compat
from vllm_relay.backend import cpu_impl, step_planner
from vllm_relay.backend.packed_cache import PackedCache
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.packed import PackedSegment
from vllm_relay.ops.step.native import NativeStep
from vllm_relay.sharing import Planner
from vllm_relay.system_kv import writer
from vllm_relay.system_kv.file import SystemKVFile
from vllm_relay.system_kv.pinned_blocks import PinnedBlocks
from vllm_relay.system_kv.stats import SystemKVStats

ERRORS = (MemoryError, RuntimeError, ValueError, torch.OutOfMemoryError, OSError)

_TORCH = "arange empty empty_like from_numpy tensor zeros"
_NUMPY = (
    "append arange array array_equal ascontiguousarray concatenate cumsum diff isin unique zeros"
)


def _named(owner: Any, names: str) -> list[tuple[Any, str]]:
    return [(owner, name) for name in names.split()]


def _places() -> dict[str, list[tuple[Any, str]]]:
    """The functions of each seam: owner and name. Only calls from `vllm_relay` count."""
    return {
        "allocation": [*_named(torch, _TORCH), *_named(np, _NUMPY)],
        "native call": [
            *_named(native.loaded(), "attend fuse pack packed"),
            *_named(cpu_impl.RelayImpl, "kernel_layout"),
        ],
        "planning": [
            *_named(step_planner.StepPlanner, "plan"),
            *_named(PackedCache, "begin_step of_step find"),
            *_named(Planner, "plan"),
            *_named(step_planner, "make_plan context_of stats_of written_blocks"),
            *_named(NativeStep, "__init__ go_on"),
        ],
        "system KV": [
            *_named(writer.Writer, "write _write_group"),
            *_named(writer, "_slots _fingerprint _first_head _check_shape"),
            *_named(SystemKVFile, "tensors"),
            *_named(cpu_impl.RelayImpl, "do_kv_cache_update keep forget pack"),
            *_named(PackedCache, "pin unpin"),
            *_named(PackedSegment, "__init__"),
        ],
        "scheduler": [
            *_named(PinnedBlocks, "rewritten _register count_hit counts"),
            *_named(compat, "block_hasher"),
            *_named(SystemKVStats, "since is_empty"),
        ],
    }


SEAMS = ("allocation", "native call", "planning", "system KV", "scheduler")


class Failure:
    """One exception at the n-th call; ``calls`` counts them, also beyond it."""

    def __init__(self, n: int) -> None:
        self.n, self.calls = n, 0
        # Two lines, as some libraries write them.
        self.error = ERRORS[n % len(ERRORS)](f"planted\nfailure {n}.")

    @property
    def cause(self) -> str:
        """Text that the log must have."""
        return " ".join(str(self.error).split())

    def before(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the failure in front of it."""

        def function(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").startswith("vllm_relay."):
                self.calls += 1
                if self.calls == self.n:
                    raise self.error
            return stock(*args, **kwargs)

        return function


@contextmanager
def planted(seam: str, n: int) -> Iterator[Failure]:
    """The package with a failure at the n-th call of a seam; none for n = 0."""
    failure = Failure(n)
    with ExitStack() as stack:
        for owner, name in _places()[seam]:
            wrapped = failure.before(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield failure
