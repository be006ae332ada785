"""Worker extension of `bench_choice.py`: times one point of the grid."""

import statistics
import time
from typing import Any

import numpy as np
import torch

from vllm_relay.calibration import kernels
from vllm_relay.calibration.probe import Probe, Shape
from vllm_relay.sharing import Forest, Planner, predict, predict_stock, reads
from vllm_relay.sharing.cost_store import find_costs

# Rounds go on until the median of the ratios is known to such a part of it (its standard error),
# but not longer than so many seconds per point.
KNOWN, BUDGET, FEWEST = 0.004, 20.0, 11


class GridWorker:
    """vLLM's ``worker_extension_cls``."""

    def measure_choice(self, given: tuple[int, ...]) -> dict[str, Any] | None:
        """One point of the grid; None where the KV cache does not hold it."""
        if not hasattr(self, "_probe"):
            self._probe = Probe(self)
        shape = Shape(*given)
        if not self._probe.fits(shape):
            return None
        with torch.inference_mode():
            return _measure(self._probe, shape)


def _measure(probe: Probe, shape: Shape) -> dict[str, Any]:
    impl, common = probe.impl, probe.step(shape)
    dtype = str(probe.dtype).removeprefix("torch.")
    found = find_costs(
        impl.num_heads,
        impl.num_kv_heads,
        impl.head_size,
        device=probe.builder.device_name(),
        dtype=dtype,
        threads=torch.get_num_threads(),
    )
    costs = found.costs.with_margin(found.margin)
    stock = probe.stock(common)
    chosen, stats = probe.relay(common, costs, levels=3)
    always, most = probe.relay(common, reads(), levels=3)
    alone = kernels.context(probe, common)
    shares = most is not None and most.groups > 0
    calls = [stock, chosen, alone, *([always] if shares else [])]

    expected = _of_first_layer(probe, stock)
    difference = max(
        (_of_first_layer(probe, call) - expected).square().mean().sqrt() for call in calls[1:]
    )
    begun = time.perf_counter()
    times: list[list[float]] = [[] for _ in calls]
    while True:
        for all_rounds, new in zip(times, probe.rounds(calls, FEWEST), strict=True):
            all_rounds += new
        ratios = [a / b for a, b in zip(times[0], times[1], strict=True)]
        low, high = np.percentile(ratios, (25, 75))
        # of the median of numbers about normally distributed
        error = 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5
        if error < KNOWN * statistics.median(ratios) or time.perf_counter() - begun > BUDGET:
            break
    medians = [statistics.median(of_call) for of_call in times]

    tables, lens = common.block_table_tensor.numpy(), common.seq_lens.numpy()
    queries = np.full(shape.rows, shape.queries, dtype=np.int32)
    choice = Planner(probe.block, reads(), 3).plan(tables, lens, queries)
    nothing = Forest((), len(lens), probe.block)
    return {
        "threads": torch.get_num_threads(),
        "costs": found.source,
        "stock_ms": 1e3 * medians[0],
        "relay_ms": 1e3 * medians[1],
        "alone_ms": 1e3 * medians[2],
        "always_ms": 1e3 * medians[-1],
        "ratio": statistics.median(ratios),
        "quartiles": [float(low), float(high)],
        "choice": "vLLM" if stats is None else "groups" if stats.groups else "no groups",
        "shares": shares,
        "predicted_stock_ms": 1e3 * predict_stock(choice.shape, found.costs),
        "predicted_alone_ms": 1e3 * predict(nothing, choice.shape, found.costs),
        "predicted_always_ms": 1e3 * predict(choice.forest, choice.shape, found.costs),
        "rounds": len(ratios),
        "relative_difference": float(difference / expected.square().mean().sqrt()),
    }


def _of_first_layer(probe: Probe, call: Any) -> torch.Tensor:
    probe.rewind()
    return call().double()
