"""Measurement of the cost model's constants inside a running CPU engine.

Every kernel is timed on steps of many sizes, and its constants are fitted to the times: least
squares of the relative errors, none below zero (a launch does not give time back).
"""

from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from typing import Any

import numpy as np
import torch

from vllm_relay import __version__
from vllm_relay.calibration import kernels
from vllm_relay.calibration.probe import Probe, Shape
from vllm_relay.sharing import KernelCosts, Planner, predict, reads
from vllm_relay.sharing.cost_store import Constants, cache_bytes

# Requests alone, decoding: they read memory. Then requests that share what caches hold; then
# several query tokens per request, which read it once.
ALONE = [Shape(*x, groups=0) for x in ((1, 0, 128), (1, 0, 2048), (4, 0, 512), (8, 0, 128))]
ALONE += [Shape(*x, groups=0) for x in ((8, 0, 2048), (32, 0, 16), (32, 0, 512), (64, 0, 128))]
SHARING = [Shape(*x) for x in ((8, 512, 16), (8, 4096, 16), (32, 512, 16), (32, 2048, 16))]
SHARING += [Shape(*x) for x in ((64, 2048, 128), (32, 8192, 128), (128, 1024, 64))]
SHARING += [Shape(32, 2048, 128, groups=8), Shape(16, 2048, 512, groups=4)]
SHARING += [Shape(*x) for x in ((8, 8192, 16), (16, 8192, 128), (64, 8192, 16))]
SEVERAL = [Shape(4, 0, 1024, 8, 0), Shape(16, 0, 512, 4, 0), Shape(2, 0, 2048, 64, 0)]
SEVERAL += [Shape(8, 1024, 64, 4), Shape(1, 0, 1024, 256, 0)]
# (queries, KV tokens) of a group
SEGMENTS = [(2, 512), (2, 4096), (8, 512), (8, 4096), (32, 1024), (32, 4096), (128, 512)]
SEGMENTS += [(128, 2048), (512, 1024)]
# Steps that show the cost of a relayed step beyond its kernels.
WHOLE = [Shape(2, 128, 16), Shape(8, 512, 16), Shape(32, 512, 64), Shape(32, 2048, 128, groups=4)]

# The terms of a kernel, in the order of `_work`.
_TERMS = ("call", "token", "first", "read", "far", "pair")
Measurement = dict[str, Any]


class Calibrator:
    """Adds a method to the engine's workers (vLLM's ``worker_extension_cls``)."""

    def measure_attention(self) -> Measurement:
        """The constants as `sharing.cost_store.Constants` has them, and how well they fit."""
        probe = Probe(self)
        with torch.inference_mode():
            return _measure(probe)


def _measure(probe: Probe) -> Measurement:
    impl, dtype = probe.impl, probe.dtype
    query = impl.num_heads * impl.head_size * dtype.itemsize
    kv = 2 * impl.num_kv_heads * impl.head_size * dtype.itemsize
    flops = 4 * impl.num_heads * impl.head_size
    units = np.array([1.0, query, kv, kv, kv, flops])
    cache = cache_bytes()
    near = cache / (2 * impl.head_size * dtype.itemsize)

    steps = [shape for shape in (*ALONE, *SHARING, *SEVERAL) if probe.fits(shape)]
    times = [probe.seconds(probe.stock(probe.step(shape))) for shape in steps]
    errors = {}
    stock, errors["stock"] = fit([_work(shape, near) for shape in steps] * units, times)

    steps = [shape for shape in (*ALONE, *SEVERAL) if probe.fits(shape)]
    times = [probe.seconds(kernels.context(probe, probe.step(shape))) for shape in steps]
    context, errors["context"] = fit([_work(shape, near) for shape in steps] * units, times)

    work, segments = [], []
    for queries, tokens in SEGMENTS:
        if tokens < probe.blocks * probe.block:
            work.append([1, queries, tokens, 0, 0, queries * tokens])
            table = np.arange(1, 1 + tokens // probe.block, dtype=np.int32)
            segments.append((torch.randn(queries, *probe.heads).to(dtype), table))
    times = [probe.seconds(kernels.system(probe, *x)) for x in segments]
    system, errors["system"] = fit(work * units, times)
    times = [probe.seconds(kernels.system(probe, *x, packed=True)) for x in segments]
    packed, errors["packed"] = fit(work * units, times)

    fusions = [(2, 8), (2, 128), (3, 64), (4, 256)]
    work = [[1, partials * tokens * query] for partials, tokens in fusions]
    times = [probe.seconds(kernels.fusion(probe, *x)) for x in fusions]
    # Fusion has no launch of its own: it is part of the one call.
    (_, fusion), errors["fusion"] = fit(work, times)

    blocks = min(8, probe.blocks - 1)
    copy = probe.seconds(kernels.copy(probe, blocks)) / (blocks * probe.block)
    # One call has everything: its launch is charged to the contexts.
    system, packed = (
        (max(kernel[0] - context[0], 0.0), *kernel[1:]) for kernel in (system, packed)
    )
    found = Constants(
        device=probe.builder.device_name(),
        threads=torch.get_num_threads(),
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        dtype=str(dtype).removeprefix("torch."),
        cache=cache,
        stock=_kernel(stock),
        context=_kernel(context),
        system=_kernel(system),
        fusion=float(fusion),
        step=0.0,
        level=0.0,
        copy=copy / kv,
        measured=f"{date.today()}, vllm-relay {__version__}",
        packed=_kernel(packed),
    )
    step, errors["whole"] = _rest(probe, found)
    return {"constants": asdict(found) | {"step": step}, "errors": errors}


def _kernel(constants: Iterable[float]) -> KernelCosts:
    return KernelCosts(**dict(zip(_TERMS, constants, strict=True)))


def _work(shape: Shape, near: float) -> list[float]:
    """Units of work of a step, by `_TERMS`, in tokens."""
    each = shape.shared + shape.own
    tokens, far = shape.rows * each, shape.rows * max(each - near, 0)
    first = shape.rows * shape.own + shape.groups * shape.shared
    return [1, shape.rows * shape.queries, first, tokens, far, shape.queries * tokens]


def fit(work: Any, times: Iterable[float]) -> tuple[tuple[float, ...], float]:
    """Constants >= 0 with ``work @ constants`` about ``times``, and the median relative error.

    Args:
        work: [measurements, constants]. times: seconds of each measurement.
    """
    work, taken = np.asarray(work, dtype=float), np.array(list(times))
    relative = work / taken[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    used = list(range(work.shape[1]))
    while True:
        # Constants that come out below zero leave one by one, the worst first.
        found = np.linalg.lstsq(relative[:, used] / scale[used], np.ones(len(taken)), rcond=None)[0]
        if found.min() >= 0:
            break
        del used[int(found.argmin())]
    constants = np.zeros(work.shape[1])
    constants[used] = found / scale[used]
    error = float(np.median(np.abs(relative @ constants - 1)))
    return tuple(float(x) for x in constants), error


def _rest(probe: Probe, found: Constants) -> tuple[float, float]:
    """Seconds of a relayed step that no kernel explains, and how far predictions are off then."""
    costs = found.costs(found.heads, found.kv_heads, found.head_size, found.dtype)
    taken, predicted = [], []
    for shape in filter(probe.fits, WHOLE):
        common = probe.step(shape)
        call, _ = probe.relay(common, reads())
        taken.append(probe.seconds(call))
        planner = Planner(probe.block, reads(), 1)
        queries = np.full(shape.rows, shape.queries, dtype=np.int32)
        choice = planner.plan(common.block_table_tensor.numpy(), common.seq_lens.numpy(), queries)
        predicted.append(predict(choice.forest, choice.shape, costs))
    step = max(float(np.median(np.array(taken) - np.array(predicted))), 0.0)
    errors = np.abs((np.array(predicted) + step) / np.array(taken) - 1)
    return step, float(np.median(errors))
