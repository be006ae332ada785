"""Measurement of the cost model's constants on the engine's own kernels and threads.

Every kernel is timed on steps of many sizes, and its constants are fitted to the times.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np
import torch

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
_OF_KERNELS = 0.7
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
        whole: steps that show the cost of groups beyond their kernels.
        seconds: `_OF_KERNELS` of them for kernels, the rest for whole steps; a round at least.
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
    rounds=5,
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
    whole=(Shape(2, 128, 16), Shape(8, 512, 16), Shape(32, 512, 64)),
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
        *(Shape(2, 128, 16), Shape(8, 512, 16), Shape(32, 512, 64)),
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
    copied = min(8, len(probe.cache) - 1)
    of_steps = [_work(step, near) for step in every] * units
    of_segments = np.array([[1, 0, n, t, 0, 0, n * t] for n, t in segments]) * units
    inputs = [(probe.query(n), np.arange(1, 1 + t // block, dtype=np.int32)) for n, t in segments]
    # Kernel -> units of work of each call, and the calls.
    kernels_of: dict[str, tuple[Any, list[Callable[[], Any]]]] = {
        "stock": (of_steps, [probe.stock(probe.step(step)) for step in every]),
        "context": (of_steps, [kernels.context(probe, probe.step(step)) for step in every]),
        "system": (of_segments, [kernels.system(probe, *x) for x in inputs]),
        "packed": (of_segments, [kernels.system(probe, *x, packed=True) for x in inputs]),
        # Fusion has no launch of its own: it is part of the one call.
        "fusion": (
            [[1, partials * tokens * query] for partials, tokens in effort.fusions],
            [kernels.fusion(probe, *x) for x in effort.fusions],
        ),
        "copy": ([[copied * block * kv]], [kernels.copy(probe, copied)]),
    }
    calls = [call for _, of_kernel in kernels_of.values() for call in of_kernel]
    times = probe.rounds(calls, effort.rounds, seconds=_OF_KERNELS * effort.seconds)
    taken = iter(map(statistics.median_low, times))  # the less disturbed one of two
    fitted, errors = {}, {}
    for name, (work, of_kernel) in kernels_of.items():
        fitted[name], errors[name] = fit(work, [next(taken) for _ in of_kernel])
    context = fitted["context"]
    # One call has everything: its launch is charged to the contexts.
    for name in ("system", "packed"):
        fitted[name] = (max(fitted[name][0] - context[0], 0.0), *fitted[name][1:])
    found = Constants(
        device=cpu_name(probe.isa, native.loaded().isa),
        threads=torch.get_num_threads(),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=str(shape.dtype).removeprefix("torch."),
        cache=cache,
        stock=_kernel(fitted["stock"]),
        context=_kernel(context),
        system=_kernel(fitted["system"]),
        fusion=fitted["fusion"][1],
        step=0.0,
        level=0.0,
        copy=fitted["copy"][0],
        measured=f"{date.today()}, {versions()}",
        packed=_kernel(fitted["packed"]),
    )
    costs = found.costs(found.heads, found.kv_heads, found.head_size, found.dtype)
    step, errors["whole"] = _rest(probe, effort, costs)
    return Measurement(replace(found, step=step), errors, rounds=len(times[0]))


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


def _rest(probe: Probe, effort: Effort, costs: Costs) -> tuple[float, float]:
    """Seconds that groups cost a step beyond their kernels, and how far predictions are off then.

    From steps with their groups and without: what else is mispredicted of a step cancels.
    """
    calls, expected = [], []
    packed = replace(costs, system=costs.packed or costs.system)  # as the probe's segments are
    for shape in _fitting(probe, *effort.whole):
        common = probe.step(shape)
        calls += [probe.relay(common, reads(least))[0] for least in (0, NO_GROUPS)]
        planner = Planner(probe.block, reads(), 1)
        queries = np.full(shape.rows, shape.queries, dtype=np.int32)
        choice = planner.plan(common.block_table_tensor.numpy(), common.seq_lens.numpy(), queries)
        none = Forest((), shape.rows, probe.block)
        expected.append([predict(forest, choice.shape, packed) for forest in (choice.forest, none)])
    times = probe.rounds(calls, effort.rounds, seconds=(1 - _OF_KERNELS) * effort.seconds)
    taken = np.median(times, axis=1).reshape(-1, 2)
    predicted = np.array(expected)
    more = (taken[:, 0] - taken[:, 1]) - (predicted[:, 0] - predicted[:, 1])
    step = max(float(np.median(more)), 0.0)
    errors = np.abs((predicted[:, 0] + step) / taken[:, 0] - 1)
    return step, float(np.median(errors))
