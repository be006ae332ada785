"""The measurement on a machine whose times are those of known costs."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.backend.cpu_bench import make_bench
from vllm_relay.calibration import measure as measurement
from vllm_relay.calibration.fitting import fit
from vllm_relay.calibration.measure import QUICK, measure
from vllm_relay.calibration.probe import Probe, cache_bytes
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.sharing import Costs, Forest, Planner, predict, predict_stock, reads
from vllm_relay.sharing.cost_store import SHIPPED, load

HEADS, KV_HEADS, SIZE = 8, 2, 64
LAUNCH = 2e-5


class KnownMachine(Probe):
    """Each call is its time in seconds, by these costs."""

    known: Costs
    disturbed: Callable[[float], float]

    def _choose(self, common: Any, costs: Costs) -> Any:
        lens, starts = common.seq_lens.numpy(), common.query_start_loc.numpy()
        planner = Planner(self.block, costs, 1)
        return planner.plan(common.block_table_tensor.numpy(), lens, np.diff(starts))

    def stock(self, common: Any) -> Any:
        return predict_stock(self._choose(common, reads()).shape, self.known)

    def context(self, common: Any) -> float:
        choice = self._choose(common, reads())
        return predict(Forest((), common.num_reqs, self.block), choice.shape, self.known)

    def relay(self, common: Any, costs: Costs, levels: int = 1) -> Any:
        choice = self._choose(common, costs)
        if not choice.forest.levels:
            return self.disturbed(self.context(common)), None
        assert self.known.packed is not None
        packed = replace(self.known, system=self.known.packed)
        return predict(choice.forest, choice.shape, packed), None

    def system(self, query: torch.Tensor, table: np.ndarray, packed: bool = False) -> float:
        kernel = self.known.packed if packed else self.known.system
        assert kernel is not None
        queries, tokens = len(query), self.block * len(table)
        work = kernel.first * tokens + (kernel.token + kernel.pair * tokens) * queries
        return (LAUNCH if packed else 3 * LAUNCH) + work

    def rounds(self, calls: Any, repeats: int, **_: Any) -> list[list[float]]:
        return [[call] * repeats for call in calls]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> KnownMachine:
    bench = make_bench(HEADS, KV_HEADS, SIZE, torch.bfloat16, "vec", 4)
    shape = bench.impl.shape
    assert isinstance(shape, AttentionShape)
    probe = KnownMachine(bench.builder, bench.layer, shape, QUICK.kv_bytes)
    entry = replace(load(SHIPPED)[0], cache=cache_bytes())
    entry = replace(entry, heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE, step=2e-5)
    known = entry.costs(HEADS, KV_HEADS, SIZE, "bfloat16")
    packed = replace(known.packed or known.system, call=8e-6)
    in_place = packed.scaled(token=1.2, pair=1.2, first=1.1)
    probe.known = replace(known, system=in_place, packed=packed, evicts=True)
    probe.disturbed = lambda seconds: seconds
    monkeypatch.setattr(measurement.kernels, "system", KnownMachine.system)
    fusion = probe.known.fusion
    monkeypatch.setattr(
        measurement.kernels, "fusion", lambda _, n, tokens: LAUNCH + n * tokens * fusion
    )
    monkeypatch.setattr(measurement.kernels, "copy", lambda _, n: n * probe.block * known.copy)
    return probe


def terms(costs: Costs) -> dict[str, float]:
    assert costs.packed is not None
    kernels = {"system": costs.system, "packed": costs.packed}
    found = {
        f"{k} {term}": x for k, kernel in kernels.items() for term, x in asdict(kernel).items()
    }
    return {**found, "step": costs.step, "fusion": costs.fusion, "copy": costs.copy}


def test_both_attentions_and_a_write_come_before_each_timed_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench(HEADS, KV_HEADS, SIZE, torch.bfloat16, "vec", 4)
    assert isinstance(bench.impl.shape, AttentionShape)
    probe = Probe(bench.builder, bench.layer, bench.impl.shape, 4 << 20)
    ran: list[Any] = []

    def relay(self: Probe, common: Any, costs: Costs, levels: int = 1) -> Any:
        call, stats = of_relay(self, common, costs, levels)
        assert stats is not None
        return lambda: (ran.append(f"relay, groups {stats.groups}"), call()), stats

    def stock(self: Probe, common: Any) -> Any:
        call = of_stock(self, common)
        return lambda: (ran.append("stock"), call())

    def write(*given: Any) -> None:
        ran.append("write")
        of_write(*given)

    of_relay, of_stock, of_write = Probe.relay, Probe.stock, probe.impl.do_kv_cache_update
    monkeypatch.setattr(probe.impl, "do_kv_cache_update", write)
    monkeypatch.setattr(Probe, "relay", relay)
    monkeypatch.setattr(Probe, "stock", stock)
    before = dict(probe._buffers)
    with torch.inference_mode():
        probe.rounds([lambda: ran.append("timed")], repeats=20)
    assert probe._buffers == before
    rounds = {tuple(ran[1 + i : 5 + i]) for i in range(0, 80, 4)}
    both, then = ("stock", "relay, groups 1"), ("write", "timed")
    assert ran[0] == "timed" and rounds == {(*both, *then), (*both[::-1], *then)}


def test_known_costs_are_recovered(machine: KnownMachine) -> None:
    found = measure(machine, QUICK)
    assert not found.rough and max(found.errors.values()) < 0.01
    costs = found.constants.costs(HEADS, KV_HEADS, SIZE, "bfloat16")
    assert terms(costs) == pytest.approx(terms(machine.known), rel=0.02, abs=1e-15)


def test_contexts_that_are_mispredicted_leave_the_arithmetic_of_groups(
    machine: KnownMachine,
) -> None:
    machine.disturbed = lambda seconds: 1.05 * seconds
    costs = measure(machine, QUICK).constants.costs(HEADS, KV_HEADS, SIZE, "bfloat16")
    assert costs.packed is not None and machine.known.packed is not None
    assert costs.packed.pair == pytest.approx(machine.known.packed.pair, rel=0.1)


def test_errors_may_be_relative_to_a_whole() -> None:
    work = np.array([[1.0, 1], [1, 2], [1, 4]])
    exact, error = fit(work, work @ [2.0, 3.0], of=[10.0, 20, 30])
    assert exact == pytest.approx((2, 3)) and error < 1e-12
    # a part that came out below zero
    constants, error = fit(work, [-1.0, 6, 12], of=[100.0, 100, 100])
    assert min(constants) >= 0 and 0 < error < 0.1
