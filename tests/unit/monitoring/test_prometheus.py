"""Relay's metrics as a scrape sees them, from workers in processes of their own."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.monitoring.workers import ROOT, heard, worker
from vllm_relay import metrics
from vllm_relay.monitoring import channel
from vllm_relay.monitoring.prometheus import COUNTERS, RelayCollector

Samples = dict[tuple[str, ...], float]
LABELS = ("model_name", "engine", "reason", "place", "level")


@pytest.fixture(autouse=True)
def new_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(channel.KEY, "")
    channel.open_channel()


def report(engine: int, first: int, groups: int = 0, **fallbacks: int) -> str:
    """Counters first, first + 1, ... and groups of one worker."""
    counters = {name: first + i for i, name in enumerate(COUNTERS)}
    tree = [
        {"level": 0, "requests": 5, "tokens": 256},
        {"level": 1, "requests": 3, "tokens": 128},
    ]
    found = {"engine": engine, "counters": counters | fallbacks, "packed_bytes": 7}
    return json.dumps(found | {"groups": tree[:groups]})


def scrape(collector: RelayCollector) -> Samples:
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {
        (sample.name, *(sample.labels[x] for x in LABELS if x in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_counters_are_those_that_workers_have() -> None:
    assert set(COUNTERS) == {
        name for name in metrics.counters() if not name.startswith("fallbacks")
    }


def test_each_engine_has_the_counters_of_a_worker_and_the_bytes_of_all() -> None:
    collector = RelayCollector("model")
    assert scrape(collector) == {}
    with ExitStack() as stack:
        stack.enter_context(worker("0-0-1", report(0, 10, 2, fallbacks=3, fallbacks_plan=3)))
        stack.enter_context(worker("0-1-2", report(0, 10, 2, fallbacks=1, fallbacks_plan=1)))
        stack.enter_context(worker("1-0-3", report(1, 20, 2, fallbacks=2, fallbacks_load=2)))
        heard(3)
        heard(len(COUNTERS) * 2 + 2 + 2 + 2 * 4, lambda: scrape(collector))
        found = scrape(collector)
    for i, name in enumerate(COUNTERS):
        both = 2 * (10 + i) if name == "kv_bytes_not_read" else 10 + i
        assert found[f"vllm:relay_{name}_total", "model", "0"] == both
        assert found[f"vllm:relay_{name}_total", "model", "1"] == 20 + i
    assert found["vllm:relay_group_requests", "model", "0", "0", "0"] == 5
    assert found["vllm:relay_group_tokens", "model", "1", "1", "1"] == 128
    assert found["vllm:relay_packed_bytes", "model", "0"] == 14
    assert found["vllm:relay_packed_bytes", "model", "1"] == 7
    reasons = {key[1:]: value for key, value in found.items() if "fallbacks" in key[0]}
    assert reasons == {("model", "0", "plan"): 4, ("model", "1", "load"): 2}


def test_a_worker_that_is_busy_counts_as_when_it_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = RelayCollector("model")
    with worker("0-0", report(0, 5)):
        heard(len(COUNTERS) + 1, lambda: scrape(collector))
    monkeypatch.setattr(channel, "ask", dict)
    assert scrape(collector)["vllm:relay_steps_total", "model", "0"] == 5


def test_workers_of_the_engine_before_are_forgotten() -> None:
    collector = RelayCollector("first")
    with worker("0-0", report(0, 5)):
        heard(len(COUNTERS) + 1, lambda: scrape(collector))
    channel.open_channel()
    collector.begin("second")
    assert scrape(collector) == {}


@pytest.mark.parametrize("answer", [OSError("no /proc/net"), {"0-0": {"engine": 0}}])
def test_what_fails_costs_no_metric_of_vllms(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(channel, "ask", ask)
    said: list[str] = []
    monkeypatch.setattr(metrics, "say_once", said.append)
    registry = CollectorRegistry()
    Gauge("vllms_own", "A metric.", registry=registry)
    registry.register(RelayCollector("model"))
    assert b"vllms_own 0.0" in generate_latest(registry)
    assert said and all(line.startswith("its counters are not in /metrics: ") for line in said)


@pytest.mark.parametrize("several", [False, True])
def test_metrics_are_in_the_registry_that_a_server_serves(several: bool, tmp_path: object) -> None:
    # As vLLM: the registry of the process, or with several API servers one over files.
    script = """
import prometheus_client as prometheus
from prometheus_client import multiprocess
from vllm_relay.monitoring.prometheus import publish
publish("first")
publish("second")
registry = prometheus.REGISTRY
if SEVERAL:
    registry = prometheus.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
for _ in range(100):
    text = prometheus.generate_latest(registry).decode()
    if "relay" in text:
        break
print(text)
"""
    with worker("0-0", report(0, 5)):
        done = subprocess.run(
            [sys.executable, "-c", script.replace("SEVERAL", str(several))],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                **({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if several else {}),
            },
            capture_output=True,
            text=True,
            check=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("vllm:relay_steps_total")]
    assert lines == ['vllm:relay_steps_total{engine="0",model_name="second"} 5.0']
