"""Measurement of the cost model's constants on the engine's own kernels and threads.

Every kernel is timed on steps of many sizes, and its constants are fitted to the times.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_relay.calibration import kernels
from vllm_relay.calibration.fitting import Measurement, fit, versions
from vllm_relay.calibration.probe import Probe, cache_bytes
from vllm_relay.calibration.steps import Shape
from vllm_relay.ops.native import library as native
from vllm_relay.sharing import Costs, Forest, KernelCosts, Planner, predict, reads
from vllm_relay.sharing.cost import far_tokens
from vllm_relay.sharing.cost_store import Constants, cpu_name

# KV reads that no group saves: `reads` then leaves every request by itself.
NO_GROUPS = 10**12
# The terms of a kernel, in the order of `_work`.
_TERMS = ("call", "row", "token", "first", "read", "far", "pair")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The steps of a measurement, each timed ``rounds`` times.

    Attributes:
        kv_bytes: of the KV cache; what does not fit is left out.
        alone: requests that share nothing and read memory. sharing: that share what caches hold.
            several: with several query tokens per request, which read it once.
        segments: (queries, KV tokens) of a group. fusions: (partials, tokens).
        whole: steps with groups, timed with and without them.
        seconds: of all rounds; a round at least.
    """

    rounds: int
    seconds: float
    kv_bytes: int
    alone: Sequence[Shape]
    sharing: Sequence[Shape]
    several: Sequence[Shape]
    segments: Sequence[tuple[int, int]]
    fusions: Sequence[tuple[int, int]]
    whole: Sequence[Shape]


def _unshared(*steps: tuple[int, int]) -> tuple[Shape, ...]:
    """Steps of (requests, tokens of each)."""
    return tuple(Shape(rows, 0, own, 1, 0) for rows, own in steps)


QUICK = Effort(
    rounds=8,
    seconds=4.0,
    kv_bytes=160 << 20,
    alone=_unshared((1, 128), (1, 2048), (8, 128), (8, 1024), (32, 16), (32, 256)),
    sharing=(Shape(8, 512, 16), Shape(32, 512, 16), Shape(32, 2048, 16), Shape(8, 4096, 16)),
    several=(
        *(Shape(4, 0, 512, 8, 0), Shape(1, 0, 1024, 256, 0)),
        *(Shape(1, 0, 64, 64, 0), Shape(16, 0, 32, 32, 0)),
    ),
    segments=((2, 512), (2, 4096), (8, 2048), (32, 512), (32, 2048), (128, 512)),
    fusions=((2, 8), (3, 64)),
    whole=(
        *(Shape(2, 2048, 16), Shape(8, 512, 16), Shape(8, 2048, 16), Shape(32, 512, 16)),
        *(Shape(8, 2048, 256), Shape(32, 512, 256), Shape(32, 2048, 16)),
        *(Shape(8, 512, 16, groups=4), Shape(32, 512, 16, groups=4)),
        *(Shape(32, 512, 16, groups=16), Shape(128, 512, 16, groups=4)),
    ),
)
THOROUGH = Effort(
    rounds=7,
    seconds=120.0,
    kv_bytes=2 << 30,
    alone=_unshared(
        (1, 128), (1, 2048), (4, 512), (8, 128), (8, 2048), (32, 16), (32, 512), (64, 128)
    ),
    sharing=(
        *(Shape(8, 512, 16), Shape(8, 4096, 16), Shape(8, 8192, 16), Shape(16, 8192, 128)),
        *(Shape(32, 512, 16), Shape(32, 2048, 16), Shape(32, 8192, 128), Shape(64, 2048, 128)),
        *(Shape(64, 8192, 16), Shape(128, 1024, 64)),
        *(Shape(32, 2048, 128, groups=8), Shape(16, 2048, 512, groups=4)),
    ),
    several=(
        *(Shape(4, 0, 1024, 8, 0), Shape(16, 0, 512, 4, 0), Shape(2, 0, 2048, 64, 0)),
        *(Shape(1, 0, 1024, 256, 0), Shape(8, 1024, 64, 4)),
        *(Shape(1, 0, 64, 64, 0), Shape(16, 0, 32, 32, 0)),
    ),
    segments=(
        *((2, 512), (2, 4096), (8, 512), (8, 4096), (32, 1024), (32, 4096), (128, 512)),
        *((128, 2048), (512, 1024)),
    ),
    fusions=((2, 8), (2, 128), (3, 64), (4, 256)),
    whole=(
        *QUICK.whole,
        *(Shape(128, 2048, 16), Shape(32, 8192, 16), Shape(8, 8192, 2048)),
        Shape(32, 2048, 128, groups=4),
    ),
)


@torch.inference_mode()
def measure(probe: Probe, effort: Effort) -> Measurement:
    """The constants of one head shape on this machine, and how well they fit."""
    shape, block = probe.shape, probe.block
    query = shape.heads * shape.head_size * shape.dtype.itemsize
    kv = 2 * shape.kv_heads * shape.head_size * shape.dtype.itemsize
    flops = 4 * shape.heads * shape.head_size
    units = np.array([1.0, 1.0, query, kv, kv, kv, flops])
    cache = cache_bytes()
    near = cache / (2 * shape.head_size * shape.dtype.itemsize)

    room = (len(probe.cache) - 1) * block
    segments = [(n, t) for n, tokens in effort.segments if (t := _whole(tokens, block)) <= room]
    beyond = Shape(4, int(2 * near), 16)
    every = _fitting(probe, *effort.alone, *effort.sharing, beyond, *effort.several)
    whole = [probe.step(step) for step in _fitting(probe, *effort.whole)]
    copied = min(8, len(probe.cache) - 1)
    of_steps = [_work(step, near) for step in every] * units
    inputs = [(probe.query(n), np.arange(1, 1 + t // block, dtype=np.int32)) for n, t in segments]
    # Fusion has no launch of its own: it is part of the one call.
    of_fusions = [[1, partials * tokens * query] for partials, tokens in effort.fusions]
    calls: dict[str, list[Callable[[], Any]]] = {
        "stock": [probe.stock(probe.step(step)) for step in every],
        "context": [probe.relay(probe.step(step), reads(NO_GROUPS))[0] for step in every],
        "system": [kernels.system(probe, *x) for x in inputs],
        "packed": [kernels.system(probe, *x, packed=True) for x in inputs],
        "fusion": [kernels.fusion(probe, *x) for x in effort.fusions],
        "copy": [kernels.copy(probe, copied)],
        # With groups and without, one after the other: both have the same queries and outputs.
        "whole": [probe.relay(x, reads(least))[0] for x in whole for least in (0, NO_GROUPS)],
    }
    every_call = [call for of_kernel in calls.values() for call in of_kernel]
    times = probe.rounds(every_call, effort.rounds, seconds=effort.seconds)
    taken = iter(map(statistics.median_low, times))  # the less disturbed one of two
    timed = {name: np.array([next(taken) for _ in of_kernel]) for name, of_kernel in calls.items()}
    errors: dict[str, float] = {}
    stock, errors["stock"] = fit(of_steps, timed["stock"])
    context, errors["context"] = fit(of_steps, timed["context"])
    (_, fusion), errors["fusion"] = fit(of_fusions, timed["fusion"])
    (copy,), errors["copy"] = fit([[copied * block * kv]], timed["copy"])
    found = Constants(
        device=cpu_name(probe.isa, native.loaded().isa),
        threads=torch.get_num_threads(),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=str(shape.dtype).removeprefix("torch."),
        cache=cache,
        stock=_kernel(stock),
        context=_kernel(context),
        system=KernelCosts(),
        packed=KernelCosts(),
        fusion=fusion,
        step=0.0,
        level=0.0,
        copy=copy,
        measured=f"{date.today()}, {versions()}",
    )

    contexts = found.costs(found.heads, found.kv_heads, found.head_size, found.dtype)
    of_groups = [_of_groups(common, block, contexts) for common in whole]
    of_system, errors_of_system = _fit_system(segments, of_groups, (query, kv, flops), timed)
    return Measurement(replace(found, **of_system), errors | errors_of_system, rounds=len(times[0]))


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """The groups of a step.

    Attributes:
        work: calls alone, steps, groups, query tokens, KV tokens and pairs of both.
        beside: predicted seconds of the contexts and of fusion. without: of contexts alone, if
            there were no groups.
    """

    work: tuple[int, ...]
    beside: float
    without: float


def _of_groups(common: CommonAttentionMetadata, block: int, contexts: Costs) -> _Groups:
    """The groups of a step in which every shared block counts; ``contexts``: their costs."""
    lens, queries = common.seq_lens.numpy(), np.diff(common.query_start_loc.numpy())
    choice = Planner(block, reads(), 1).plan(common.block_table_tensor.numpy(), lens, queries)
    groups = [group for level in choice.forest.levels for group in level]
    tokens = np.array([queries[x.rows].sum() for x in groups])
    kv = np.array([x.segment.blocks * block for x in groups])
    return _Groups(
        work=(0, 1, len(groups), int(tokens.sum()), int(kv.sum()), int(tokens @ kv)),
        beside=predict(choice.forest, choice.shape, contexts),
        without=predict(Forest((), len(lens), block), choice.shape, contexts),
    )


def _fit_system(
    segments: Sequence[tuple[int, int]],
    of_groups: Sequence[_Groups],
    units: tuple[int, int, int],
    timed: Mapping[str, NDArray[np.float64]],
) -> tuple[dict[str, Any], dict[str, float]]:
    """`Constants` of a step with groups and of system attention; and errors, as `Measurement`'s.

    From segments alone and from what groups add to whole steps, in one fit: the same work takes as
    long in both, and the rest is what a step and a group cost.

    Args:
        segments: (queries, KV tokens). units: bytes of a query token and of a KV token, operations
            of a pair. timed: seconds, by what `measure` calls.
    """
    of_alone = [(1, 0, 0, n, t, n * t) for n, t in segments]
    work = np.array([*of_alone, *(x.work for x in of_groups)], dtype=float) * (1, 1, 1, *units)
    with_groups, without = timed["whole"].reshape(-1, 2).T
    beside = np.array([x.beside for x in of_groups])
    added = with_groups - without + np.array([x.without for x in of_groups]) - beside
    constants, _ = fit(
        work,
        [*timed["packed"], *added],
        of=[*timed["packed"], *np.maximum(with_groups, without)],
    )
    _, step, call, token, first, pair = constants
    alone, in_steps = np.split(work @ constants, [len(segments)])
    errors = {
        "packed": float(np.median(np.abs(alone / timed["packed"] - 1))),
        "whole": float(np.median(np.abs((in_steps + beside) / with_groups - 1))),
    }
    # In place reads and arithmetic of the same work take longer.
    tokens, reads_of, pairs = (work[: len(segments), 3:] * (token, first, pair)).T
    of_system = np.column_stack([np.ones(len(segments)), tokens + pairs, reads_of])
    (_, arithmetic, reading), errors["system"] = fit(of_system, timed["system"])
    packed = KernelCosts(call=call, token=token, first=first, pair=pair)
    system = packed.scaled(token=arithmetic, first=reading, pair=arithmetic)
    return {"step": step, "system": system, "packed": packed}, errors


def _whole(tokens: int, block: int) -> int:
    """So many tokens or more, in whole blocks: only those are shared."""
    return -(-tokens // block) * block


def _fitting(probe: Probe, *steps: Shape) -> list[Shape]:
    """The steps that the KV cache holds, their prefixes in whole blocks."""
    whole = [replace(step, shared=_whole(step.shared, probe.block)) for step in steps]
    return [step for step in whole if probe.fits(step)]


def _kernel(constants: Iterable[float]) -> KernelCosts:
    return KernelCosts(**dict(zip(_TERMS, constants, strict=True)))


def _work(shape: Shape, near: float) -> list[float]:
    """Units of work of a step, by `_TERMS`, in tokens."""
    each = shape.shared + shape.own
    tokens = shape.rows * each
    far = shape.rows * float(far_tokens(np.array([each]), near, evicts=True)[0])
    first = shape.rows * shape.own + shape.groups * shape.shared
    rows, queries = shape.rows, shape.queries
    return [1, rows, rows * queries, first, tokens, far, queries * tokens]
