"""Relay's counters as Prometheus metrics, beside vLLM's own."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from vllm_relay import metrics
from vllm_relay.monitoring import channel
from vllm_relay.patching import wrap

# Counters of `metrics.counters`, and their documentation.
COUNTERS = {
    "steps": "Engine steps planned, per KV cache group.",
    "steps_relayed": "Steps with at least one group of requests that share a prefix.",
    "steps_ungrouped": "Steps on relay's CPU kernels without a group.",
    "groups": "Groups of relayed steps.",
    "requests": "Requests in groups of relayed steps.",
    "tokens_shared": "KV tokens of shared segments, once per group and step.",
    "kv_bytes_not_read": "KV bytes that vLLM's own attention would have read in addition.",
    "predicted_saved_seconds": "Time of attention saved on the CPU, by the cost model.",
    "planning_seconds": "Time spent on planning steps on the CPU.",
}
# Gauges of the groups of an engine's latest step; ``place`` is their order in `metrics.groups`.
GROUPS = {
    "requests": "Requests of a group of the latest step, the groups inside of it next.",
    "tokens": "KV tokens that a group of the latest step shares.",
}
# Each worker counts its part of them; of the others all workers of an engine count the same.
SUMMED = ("kv_bytes_not_read",)
FALLBACKS = "fallbacks_"


class RelayCollector(Collector):
    """``vllm:relay_*`` of every engine of this process's server.

    A worker that does not answer in time, in a long step, counts as when it was last heard.

    Args:
        model_name: value of vLLM's label of this name.
    """

    def __init__(self, model_name: str) -> None:
        self.begin(model_name)

    def begin(self, model_name: str) -> None:
        """Serve the engine that is started next; workers heard before are forgotten."""
        self.model_name = model_name
        self._heard: dict[str, channel.Report] = {}

    def describe(self) -> list[Metric]:
        """No metric: the registry does not ask the workers when this is registered."""
        return []

    def collect(self) -> list[Metric]:
        """The metrics as of now, in at most `channel.PATIENCE` seconds; none before a worker.

        Whatever fails, vLLM's own metrics are served.
        """
        try:
            self._heard |= channel.ask()
            return list(self._families())
        except Exception as error:
            metrics.say_once(f"its counters are not in /metrics: {type(error).__name__}: {error}")
            return []

    def _families(self) -> Iterator[Metric]:
        engines: dict[str, list[channel.Report]] = defaultdict(list)
        for _, report in sorted(self._heard.items()):
            engines[str(report["engine"])].append(report)
        if not engines:
            return
        labels = ["model_name", "engine"]
        for name, text in COUNTERS.items():
            family = CounterMetricFamily(f"vllm:relay_{name}", text, labels=labels)
            for engine, workers in engines.items():
                values = [worker["counters"][name] for worker in workers]
                value = sum(values) if name in SUMMED else values[0]
                family.add_metric([self.model_name, engine], value)
            yield family
        packed = GaugeMetricFamily(
            "vllm:relay_packed_bytes", "Bytes of packed segments, of all workers.", labels=labels
        )
        for engine, workers in engines.items():
            packed.add_metric([self.model_name, engine], sum(x["packed_bytes"] for x in workers))
        yield packed
        for name, text in GROUPS.items():
            of_groups = GaugeMetricFamily(
                f"vllm:relay_group_{name}", text, labels=[*labels, "place", "level"]
            )
            for engine, workers in engines.items():
                for place, group in enumerate(workers[0]["groups"]):  # alike in all workers
                    label = [self.model_name, engine, str(place), str(group["level"])]
                    of_groups.add_metric(label, group[name])
            yield of_groups
        family = CounterMetricFamily(
            "vllm:relay_fallbacks",
            "Failures that were left to vLLM's own attention, by what failed.",
            labels=[*labels, "reason"],
        )
        for engine, workers in engines.items():
            for reason, count in sorted(_fallbacks(workers).items()):
                family.add_metric([self.model_name, engine, reason], count)
        yield family


def _fallbacks(workers: list[channel.Report]) -> dict[str, int]:
    """Fallbacks of all workers by reason."""
    found: dict[str, int] = defaultdict(int)
    for worker in workers:
        for name, count in worker["counters"].items():
            if name.startswith(FALLBACKS):
                found[name.removeprefix(FALLBACKS)] += count
    return found


_collector: RelayCollector | None = None


def publish(model_name: str) -> None:
    """Add relay's metrics to those of this process, and of several API servers. Idempotent.

    vLLM serves ``/metrics`` from the registry of the process, or, with several API servers, from a
    MultiProcessCollector that knows only what lies in files.
    """
    global _collector
    if _collector is not None:
        _collector.begin(model_name)
        return
    _collector = collector = RelayCollector(model_name)
    REGISTRY.register(collector)

    @wrap(MultiProcessCollector, "collect")
    def collect(stock: Any, self: Any) -> Iterator[Metric]:
        yield from stock(self)
        yield from collector.collect()
