"""Hits of system KVs, on vLLM's own ways: its log line and ``/metrics``."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


class SystemKVStats(KVConnectorStats):
    """``data``: prompt -> {"requests_hit", "tokens_hit": since the last; "blocks": now}."""

    def since(self, before: "SystemKVStats") -> "SystemKVStats":
        """What came after ``before``; prompts about which nothing is new are left out."""
        new = {}
        for name, entry in self.data.items():
            old = before.data.get(name)
            if entry != old:
                old = old or {"requests_hit": 0, "tokens_hit": 0}
                counted = {key: entry[key] - old[key] for key in ("requests_hit", "tokens_hit")}
                new[name] = {**counted, "blocks": entry["blocks"]}
        return SystemKVStats(new)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "SystemKVStats":
        for name, entry in other.data.items():
            old = self.data.get(name, {"requests_hit": 0, "tokens_hit": 0})
            counted = {key: entry[key] + old[key] for key in ("requests_hit", "tokens_hit")}
            self.data[name] = {**counted, "blocks": entry["blocks"]}
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            f"system KV {name} {key}": value
            for name, entry in self.data.items()
            for key, value in entry.items()
        }

    def is_empty(self) -> bool:
        return not self.data


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
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        self._metrics = {
            "requests_hit": counter(
                name="vllm:relay_system_kv_requests",
                documentation="Requests that began in the pinned blocks of a system KV.",
                labelnames=names,
            ),
            "tokens_hit": counter(
                name="vllm:relay_system_kv_tokens",
                documentation="Prompt tokens that such requests found there.",
                labelnames=names,
            ),
            "blocks": gauge(
                name="vllm:relay_system_kv_blocks",
                documentation="KV cache blocks pinned for a system KV.",
                multiprocess_mode="mostrecent",
                labelnames=names,
            ),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for prompt, entry in transfer_stats_data.items():
            labels = [*self.per_engine_labelvalues[engine_idx], prompt]
            for key in ("requests_hit", "tokens_hit"):
                self._metrics[key].labels(*labels).inc(entry[key])
            self._metrics["blocks"].labels(*labels).set(entry["blocks"])
