"""What `bench_choice.py` runs inside the engine's worker."""

import statistics
import time
from typing import Any

import numpy as np
import torch

from vllm_relay.backend.probe import Probe, Shape
from vllm_relay.sharing import Planner, predict, reads
from vllm_relay.sharing.device import cpu_name, find_costs

# Seconds of measuring per call and point, and the fewest rounds.
BUDGET, FEWEST = 0.8, 11


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
    dtype = str(probe.cache(probe.layers[0]).dtype).removeprefix("torch.")
    found = find_costs(
        impl.num_heads,
        impl.num_kv_heads,
        impl.head_size,
        device=cpu_name(probe.builder.isa),
        dtype=dtype,
        threads=torch.get_num_threads(),
    )
    costs = found.costs.with_margin(found.margin)
    stock = probe.stock(common)
    chosen, relayed = probe.relay(common, costs, levels=3)
    always, shares = probe.relay(common, reads(), levels=3)
    calls = [stock, chosen, *([always] if shares else [])]

    begun = time.perf_counter()
    expected = _of_first_layer(probe, stock)
    once = time.perf_counter() - begun
    difference = (_of_first_layer(probe, always) - expected).square().mean().sqrt()
    repeats = int(max(FEWEST, min(101, BUDGET / (once + 0.01))))
    times = probe.rounds(calls, repeats)
    medians = [statistics.median(of_call) for of_call in times]
    ratios = [a / b for a, b in zip(times[0], times[1], strict=True)]

    tables, lens = common.block_table_tensor.numpy(), common.seq_lens.numpy()
    queries = np.full(shape.rows, shape.queries, dtype=np.int32)
    choice = Planner(probe.block, reads(), 3).plan(tables, lens, queries)
    return {
        "threads": torch.get_num_threads(),
        "costs": found.source,
        "stock_ms": 1e3 * medians[0],
        "relay_ms": 1e3 * medians[1],
        "always_ms": 1e3 * medians[-1],
        "ratio": statistics.median(ratios),
        "quartiles": np.percentile(ratios, (25, 75)).tolist(),
        "relayed": relayed,
        "shares": shares,
        "predicted_stock_ms": 1e3 * choice_time(choice, found.costs, False),
        "predicted_always_ms": 1e3 * choice_time(choice, found.costs, True),
        "rounds": repeats,
        "relative_difference": float(difference / expected.square().mean().sqrt()),
    }


def choice_time(choice: Any, costs: Any, relayed: bool) -> float:
    """Predicted seconds of a step with the groups of a choice, or without."""
    forest = choice.forest
    if not relayed:
        forest = type(forest)((), forest.num_rows, forest.block_size)
    return predict(forest, choice.shape, costs)


def _of_first_layer(probe: Probe, call: Any) -> torch.Tensor:
    probe.rewind()
    return call().double()
