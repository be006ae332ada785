"""Costs at an engine's start: measured once per machine, kept, and never in the way."""

import logging
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from tests.unit.backend import cpu_bench
from tests.unit.backend.cpu_bench import Bench, make_bench
from vllm_relay import metrics
from vllm_relay.calibration import fitting, start_up
from vllm_relay.calibration.fitting import Measurement, versions
from vllm_relay.sharing import Costs, reads
from vllm_relay.sharing.cost_store import MARGIN, SHIPPED, Constants, load, save


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "devices.json"
    monkeypatch.setenv("VLLM_RELAY_DEVICES", str(path))
    monkeypatch.setattr(start_up, "_measurements", [])
    monkeypatch.setattr(metrics, "_said", set())
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes that were measured, with constants of another device in place of times."""
    shapes: list[Any] = []
    entry = load(SHIPPED)[0]

    def fake(probe: Any, effort: Any) -> Measurement:
        shapes.append(probe.shape)
        heads = replace(entry, heads=8, kv_heads=2, head_size=64, measured=f"today, {versions()}")
        here = replace(heads, device=start_up.cpu_name(probe.isa, start_up.native.loaded().isa))
        return Measurement(replace(here, threads=torch.get_num_threads()), {"stock": 0.1}, rounds=3)

    monkeypatch.setattr(start_up, "measure", fake)
    return shapes


class Forgetful(list[Constants]):
    def append(self, measurement: Constants) -> None:
        pass


def start(dtype: torch.dtype = torch.bfloat16, **scores: Any) -> Bench:
    return make_bench(8, 2, 64, dtype, "vec", 4, scores=scores, min_saved_tokens=None)


def costs_of(bench: Bench) -> Costs:
    assert bench.impl.shape is not None and bench.builder.planner is not None
    return bench.builder.planner._costs[bench.impl.shape]


def segment_seconds(costs: Costs, queries: int, tokens: int) -> float:
    system = costs.system
    return system.call + system.first * tokens + (system.token + system.pair * tokens) * queries


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=metrics.logger.name)
    return caplog


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_a_machine_that_nobody_measured_measures_itself_once(
    dtype: torch.dtype, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine of the test is.
    monkeypatch.setattr(Measurement, "rough", False)
    costs = costs_of(start(dtype))
    (entry,) = load(devices)
    name = str(dtype).removeprefix("torch.")
    assert (entry.heads, entry.kv_heads, entry.head_size, entry.dtype) == (8, 2, 64, name)
    assert entry.threads == torch.get_num_threads() and entry.measured.endswith(versions())
    assert costs == entry.costs(8, 2, 64, name).with_margin(MARGIN)
    assert all(sum(asdict(kernel).values()) > 0 for kernel in (costs.stock, costs.context))

    monkeypatch.setattr(start_up, "_measurements", [])  # another process
    monkeypatch.setattr(start_up, "measure", lambda *_: pytest.fail("measured again"))
    assert costs_of(start(dtype)) == costs


@pytest.mark.parametrize("block", [96, 640, 1152])
def test_any_block_size_is_measured(
    block: int, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of hybrid models are larger than the prefixes of some steps."""
    monkeypatch.setattr(cpu_bench, "BLOCK", block)
    monkeypatch.setattr(Measurement, "rough", False)
    costs = costs_of(start())
    assert devices.exists()
    assert segment_seconds(costs, 32, 4096) > 3 * segment_seconds(costs, 2, 512)


def test_of_workers_that_start_together_one_measures(
    devices: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, found = start(), []
    assert bench.impl.shape is not None
    devices.unlink()
    measured.clear()
    # The measurements of a process, which another one finds in the file only.
    monkeypatch.setattr(start_up, "_measurements", Forgetful())
    at_once = start_up.measure

    def load_or_measure() -> None:
        assert bench.impl.shape is not None
        found.append(start_up.load_or_measure(bench.builder, bench.layer, bench.impl.shape))

    other = Thread(target=load_or_measure)

    def measure_while_another_starts(probe: Any, effort: Any) -> Measurement:
        monkeypatch.setattr(start_up, "measure", at_once)
        other.start()
        other.join(1)  # it measures now, unless it waits for this one
        return at_once(probe, effort)

    monkeypatch.setattr(start_up, "measure", measure_while_another_starts)
    load_or_measure()
    other.join()
    assert len(measured) == 1
    assert found[0] == found[1] == load(devices)[0].costs(8, 2, 64, "bfloat16").with_margin(MARGIN)


def test_windows_and_caps_have_the_costs_of_their_heads(devices: Path, measured: list[Any]) -> None:
    for scores in ({}, {"window": 16}, {"softcap": 2.0}):
        start(**scores)
    (shape,) = measured
    assert (shape.window, shape.softcap) == (0, 0.0)


@pytest.mark.parametrize(
    "change", [{"measured": "2026-01-01, vllm-relay 0.0.1, vLLM 0.1"}, {"threads": 77}]
)
def test_other_versions_and_threads_are_measured_anew(
    devices: Path, measured: list[Any], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    (entry,) = load(devices)
    devices.unlink()
    save([replace(entry, **change)], devices)
    monkeypatch.setattr(start_up, "_measurements", [])
    start()
    assert len(measured) == 2
    assert len(load(devices)) == 2 and load(devices)[0].measured.endswith(versions())


def test_a_rough_measurement_is_used_with_a_wider_margin_and_not_kept(
    devices: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = costs_of(start())
    devices.unlink()
    monkeypatch.setattr(start_up, "_measurements", [])
    monkeypatch.setattr(fitting, "LEAST_ROUNDS", 4)
    rough = costs_of(start())
    assert not devices.exists()
    assert rough.context.first > exact.context.first and rough.stock == exact.stock
    costs_of(start())
    assert len(measured) == 3


def _unreadable(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("{")


def _no_folder(path: Path) -> None:
    path.parent.touch()


@pytest.mark.parametrize("break_", [_unreadable, _no_folder])
def test_what_cannot_be_kept_stays_in_memory(
    break_: Any, devices: Path, measured: list[Any], log: pytest.LogCaptureFixture
) -> None:
    break_(devices)
    before = {
        path: path.read_bytes() for path in devices.parent.parent.rglob("*") if path.is_file()
    }
    for _ in range(2):
        assert start().builder.planner is not None
    assert len(measured) == 1
    after = {path: path.read_bytes() for path in devices.parent.parent.rglob("*") if path.is_file()}
    assert after == before
    assert sum("not kept" in line for line in log.messages) == 1


def test_with_a_setting_nothing_is_measured(devices: Path, measured: list[Any]) -> None:
    bench = make_bench(8, 2, 64, torch.bfloat16, "vec", 4, min_saved_tokens=7)
    assert costs_of(bench) == reads(7)
    assert not measured and not devices.exists()


def test_a_measurement_that_fails_leaves_the_shipped_costs(
    devices: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Constants:
        raise MemoryError("no room")

    monkeypatch.setattr(start_up, "measure", fail)
    assert start().builder.planner is not None
    text = "\n".join(log.messages)
    assert "attention could not be measured: MemoryError: no room" in text
    assert "shipped with vllm-relay" in text
    assert not devices.exists()
