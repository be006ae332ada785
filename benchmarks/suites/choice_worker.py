"""Worker extension of `bench_choice.py`: times one point of the grid."""

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_relay.calibration.measure import NO_GROUPS
from vllm_relay.calibration.probe import Probe
from vllm_relay.calibration.start_up import load_or_measure
from vllm_relay.calibration.steps import Shape
from vllm_relay.calibration.worker import probed_layers
from vllm_relay.sharing import Costs, Forest, Planner, predict, predict_stock, reads

# Rounds go on until the median of the ratios is known to such a part of it (its standard error),
# but not longer than so many seconds per point.
KNOWN, BUDGET, FEWEST = 0.004, 10.0, 11


class GridWorker:
    """vLLM's ``worker_extension_cls``."""

    def measure_choice(
        self, given: dict[str, int], window: int, sinks: bool, kv_bytes: int
    ) -> dict[str, Any] | None:
        """One point of the grid; None where the KV cache does not hold it.

        Args:
            given: of a `Shape`. window: tokens, 0: none. sinks: whether the layer has some.
        """
        shape, kind = Shape(**given), (window, sinks)
        if getattr(self, "_kind", None) != kind:
            self._kind, self._probe = kind, None  # two caches might not fit
            builder, of_model, plain = next(probed_layers(self))
            self._costs = load_or_measure(builder, of_model, plain)
            self._probe = Probe(
                builder,
                of_model,
                replace(plain, window=window),
                kv_bytes,
                sinks=torch.randn(plain.heads) if sinks else None,
            )
        if not self._probe.fits(shape):
            return None
        with torch.inference_mode():
            return _measure(self._probe, self._costs, shape)


def _measure(probe: Probe, costs: Costs, shape: Shape) -> dict[str, Any]:
    common = probe.step(shape)
    stock = probe.stock(common)
    chosen, stats = probe.relay(common, costs, levels=3)
    always, most = probe.relay(common, reads(), levels=3)
    alone, _ = probe.relay(common, reads(NO_GROUPS))
    shares = most is not None and most.groups > 0
    calls = {"stock": stock, "alone": alone, **({"always": always} if shares else {})}
    # Where the choice is one of these ways it is not timed twice: equal calls differ by where
    # their memory lies.
    choice = "stock" if stats is None else "alone" if not stats.groups else "always"
    if choice == "always" and stats != most:
        choice, calls = "chosen", {**calls, "chosen": chosen}

    expected = stock().double()
    difference = max((call().double() - expected).square().mean().sqrt() for call in calls.values())
    begun = time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in calls}
    while True:
        for name, new in zip(times, probe.rounds(list(calls.values()), FEWEST), strict=True):
            times[name] += new
        others = [times[name] for name in times if name != choice]
        known = all(_error(other, times[choice]) < KNOWN for other in others)
        if known or time.perf_counter() - begun > BUDGET:
            break
    ratios = [a / b for a, b in zip(times["stock"], times[choice], strict=True)]
    low, high = np.percentile(ratios, (25, 75))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    best = times[min(medians, key=medians.__getitem__)]

    tables, lens = common.block_table_tensor.numpy(), common.seq_lens.numpy()
    queries = np.diff(common.query_start_loc.numpy())
    costs = replace(costs, system=costs.packed or costs.system)  # as the probe's segments are
    most_groups = Planner(probe.block, reads(), 3, probe.shape.window).plan(tables, lens, queries)
    nothing = Forest((), len(lens), probe.block)
    return {
        "threads": torch.get_num_threads(),
        "stock_ms": 1e3 * medians["stock"],
        "relay_ms": 1e3 * medians[choice],
        "alone_ms": 1e3 * medians["alone"],
        "always_ms": 1e3 * medians.get("always", medians["alone"]),
        "ratio": statistics.median(ratios),
        "of_best": statistics.median(a / b for a, b in zip(best, times[choice], strict=True)),
        "quartiles": [float(low), float(high)],
        "choice": "vLLM" if stats is None else "groups" if stats.groups else "no groups",
        "shares": shares,
        "predicted_stock_ms": 1e3 * predict_stock(most_groups.shape, costs),
        "predicted_alone_ms": 1e3 * predict(nothing, most_groups.shape, costs),
        "predicted_always_ms": 1e3 * predict(most_groups.forest, most_groups.shape, costs),
        "rounds": len(ratios),
        "relative_difference": float(difference / expected.square().mean().sqrt()),
    }


def _error(other: list[float], chosen: list[float]) -> float:
    """Standard error of the median ratio of two ways, as a part of it.

    Of numbers that are about normally distributed.
    """
    ratios = [a / b for a, b in zip(other, chosen, strict=True)]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return float(1.25 * (high - low) / 1.35 / len(ratios) ** 0.5 / middle)
