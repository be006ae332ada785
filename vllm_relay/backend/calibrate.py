"""Measure the constants of the cost model inside a running CPU engine.

Every kernel is timed on steps of many sizes, and its constants are fitted to the times: least
squares of the relative errors, none below zero (a launch does not give time back).
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple
from datetime import date
from typing import Any

import numpy as np
import torch

from vllm_relay import __version__
from vllm_relay.backend.probe import Probe, Shape
from vllm_relay.ops import system_attention
from vllm_relay.ops.cpu.fusion import fuse_into
from vllm_relay.sharing import predict, reads
from vllm_relay.sharing.device import Constants, Kernel, cache_bytes, cpu_name
from vllm_relay.sharing.search import Planner

# Rows alone, decoding: they read memory. Then rows that share what caches hold; then several query
# tokens per row, which read it once.
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
# Steps that show what a relayed step costs beyond its kernels.
WHOLE = [Shape(2, 128, 16), Shape(8, 512, 16), Shape(32, 512, 64), Shape(32, 2048, 128, groups=4)]

Measurement = dict[str, Any]


class Calibrator:
    """Adds a method to the engine's workers (vLLM's ``worker_extension_cls``)."""

    def measure_attention(self) -> Measurement:
        """The constants as `sharing.device.Constants` has them, and how well they fit."""
        probe = Probe(self)
        with torch.inference_mode():
            return _measure(probe)


def _measure(probe: Probe) -> Measurement:
    impl = probe.impl
    dtype = probe.cache(probe.layers[0]).dtype
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
    times = [probe.seconds(_context(probe, shape)) for shape in steps]
    context, errors["context"] = fit([_work(shape, near) for shape in steps] * units, times)

    work, times = [], []
    for queries, tokens in SEGMENTS:
        work.append([1, queries, tokens, 0, 0, queries * tokens])
        times.append(probe.seconds(_system(probe, queries, tokens, dtype)))
    system, errors["system"] = fit(work * units, times)

    fusions = [(2, 8), (2, 128), (3, 64), (4, 256)]
    work = [[1, partials * tokens * query] for partials, tokens in fusions]
    times = [probe.seconds(_fusion(probe, *x, dtype)) for x in fusions]
    (fuse, fusion), errors["fusion"] = fit(np.array(work, dtype=float), times)

    found = Constants(
        device=cpu_name(probe.builder.isa),
        threads=torch.get_num_threads(),
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        dtype=str(dtype).removeprefix("torch."),
        cache=cache,
        stock=Kernel(*stock),
        context=_not_faster(Kernel(*context), Kernel(*stock)),
        system=Kernel(*system),
        fusion=float(fusion),
        step=0.0,
        level=float(fuse),
        copy=_copy(probe) / kv,
        measured=f"{date.today()}, vllm-relay {__version__}",
    )
    step, errors["whole"] = _rest(probe, found)
    return {"constants": asdict(found) | {"step": step}, "errors": errors}


def _work(shape: Shape, near: float) -> list[float]:
    """What a step multiplies the constants of `Kernel` with, but for the units."""
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


def _not_faster(context: Kernel, stock: Kernel) -> Kernel:
    """Context attention is vLLM's kernel and more: where a fit says otherwise it is noise."""
    return Kernel(*map(max, astuple(context), astuple(stock)))


def _context(probe: Probe, shape: Shape) -> Callable[[], Any]:
    """Context attention of rows alone, with the LSE."""
    common = probe.step(shape)
    lens = common.seq_lens.numpy()
    queries = np.full(shape.rows, shape.queries, dtype=np.int32)
    tables = common.block_table_tensor.numpy()
    metadata, twice = probe.builder._context(common, tables, lens, queries)
    query = probe.query(common)
    lse = torch.zeros(query.shape[1], query.shape[0])

    def call() -> Any:
        layer = probe.next_layer()
        return layer.impl.attend_context(
            layer, query, probe.cache(layer), metadata, twice, [query], [lse]
        )

    return call


def _system(probe: Probe, queries: int, tokens: int, dtype: torch.dtype) -> Callable[[], Any]:
    impl = probe.impl
    query = torch.randn(queries, impl.num_heads, impl.head_size).to(dtype)
    # One per layer, head-major as the copies are.
    keys, values = (
        torch.randn(len(probe.layers), impl.num_kv_heads, tokens, impl.head_size).to(dtype)
        for _ in range(2)
    )
    turn = 0

    def call() -> Any:
        nonlocal turn
        turn = (turn + 1) % len(keys)
        k, v = keys[turn].transpose(0, 1), values[turn].transpose(0, 1)
        return system_attention(query, k, v, scale=impl.scale)

    return call


def _fusion(probe: Probe, partials: int, tokens: int, dtype: torch.dtype) -> Callable[[], Any]:
    impl = probe.impl
    shape = (partials, tokens, impl.num_heads, impl.head_size)
    outs = list(torch.randn(shape).to(dtype))
    lses = list(torch.randn(partials, impl.num_heads, tokens))
    index = torch.randperm(tokens)
    out = torch.empty_like(outs[0])
    return lambda: fuse_into(out, index, [outs[0][index], *outs[1:]], lses)


def _copy(probe: Probe) -> float:
    """Seconds to copy one KV token of one layer."""
    blocks = min(8, probe.blocks - 1)
    ids = list(range(1, blocks + 1))
    layout, impl = probe.impl._layout, probe.impl
    assert layout is not None

    def call() -> None:
        cache = probe.cache(probe.next_layer())
        keys = cache.new_empty(impl.num_kv_heads, blocks * probe.block, impl.head_size)
        layout.copy_rows(cache, ids, keys, torch.empty_like(keys))

    return probe.seconds(call) / (blocks * probe.block)


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
        # No row is left to vLLM's own kernel.
        predicted.append(predict(choice.forest, choice.shape, costs) - costs.stock.call)
    rest = np.array(taken) - np.array(predicted)
    step = max(float(np.median(rest)), 0.0)
    errors = np.abs((np.array(predicted) + step) / np.array(taken) - 1)
    return step, float(np.median(errors))
