"""Hits of system KVs in vLLM's own statistics: its log line and ``/metrics``."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# Counters of a prompt: names in Prometheus, and documentation there.
_COUNTERS = {
    "requests_hit": ("requests", "Requests that began in the pinned blocks of a system KV."),
    "tokens_hit": ("tokens", "Prompt tokens that such requests found there."),
}


class SystemKVStats(KVConnectorStats):
    """``data``: prompt -> {"requests_hit", "tokens_hit": since the last; "blocks": now}."""

    def since(self, before: "SystemKVStats") -> "SystemKVStats":
        """The difference from ``before``; unchanged prompts are left out."""
        new = {
            name: _combine(entry, before.data.get(name), -1)
            for name, entry in self.data.items()
            if entry != before.data.get(name)
        }
        return SystemKVStats(new)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "SystemKVStats":
        for name, entry in other.data.items():
            self.data[name] = _combine(entry, self.data.get(name), 1)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            f"system KV {name} {key}": value
            for name, entry in self.data.items()
            for key, value in entry.items()
        }

    def is_empty(self) -> bool:
        return not self.data


def _combine(entry: dict[str, int], other: dict[str, int] | None, sign: int) -> dict[str, int]:
    """``entry`` with the other's counters added to its own, ``sign`` times."""
    return entry | {key: entry[key] + sign * (other or {}).get(key, 0) for key in _COUNTERS}


class SystemKVMetrics(KVConnectorPromMetrics):
    """``vllm:relay_system_kv_requests_total``, ``..._tokens_total``, ``..._blocks`` by prompt."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = [*labelnames, "prompt"]
        self._counters = {
            key: metric_types[Counter](
                name=f"vllm:relay_system_kv_{name}", documentation=text, labelnames=names
            )
            for key, (name, text) in _COUNTERS.items()
        }
        self._blocks = metric_types[Gauge](
            name="vllm:relay_system_kv_blocks",
            documentation="KV cache blocks pinned for a system KV.",
            multiprocess_mode="mostrecent",
            labelnames=names,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for prompt, entry in transfer_stats_data.items():
            labels = [*self.per_engine_labelvalues[engine_idx], prompt]
            for key, counter in self._counters.items():
                counter.labels(*labels).inc(entry[key])
            self._blocks.labels(*labels).set(entry["blocks"])
