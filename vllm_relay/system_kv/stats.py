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


# Key of `SystemKVStats.data` beside the prompts: requests and tokens of the hottest prefixes.
HOT = "(hot)"
PLACES = 10
_HOT = {
    "requests": "Requests of late under a hot prefix, by its place: a decayed count.",
    "tokens": "Tokens of a hot prefix, by its place.",
}


class SystemKVStats(KVConnectorStats):
    """``data``: prompt -> {"requests_hit", "tokens_hit": since the last; "blocks": now}.

    And `HOT` -> list of [requests, tokens], see `Remembering.hottest`.
    """

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
        found: dict[str, int | float] = {}
        for name, entry in self.data.items():
            if name == HOT:
                found["hot prefixes"] = len(entry)
            else:
                found |= {f"system KV {name} {key}": value for key, value in entry.items()}
        return found

    def is_empty(self) -> bool:
        return not self.data


def _combine(entry: Any, other: Any, sign: int) -> Any:
    """``entry`` with the other's counters added to its own, ``sign`` times; of `HOT` as it is."""
    if isinstance(entry, list):
        return entry
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
        self._hot = {
            name: metric_types[Gauge](
                name=f"vllm:relay_hot_prefix_{name}",
                documentation=text,
                multiprocess_mode="mostrecent",
                labelnames=[*labelnames, "place"],
            )
            for name, text in _HOT.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for prompt, entry in transfer_stats_data.items():
            if prompt == HOT:
                self._show_hot(entry, engine_idx)
                continue
            labels = [*self.per_engine_labelvalues[engine_idx], prompt]
            for key, counter in self._counters.items():
                counter.labels(*labels).inc(entry[key])
            self._blocks.labels(*labels).set(entry["blocks"])

    def _show_hot(self, prefixes: list[list[float]], engine: int) -> None:
        """Set the gauges of an engine's hot prefixes; empty places are 0.

        All of them: another API server may have set them before.
        """
        empty: list[list[float]] = [[0, 0]] * (PLACES - len(prefixes))
        for place, values in enumerate([*prefixes, *empty]):
            for gauge, value in zip(self._hot.values(), values, strict=True):
                gauge.labels(*self.per_engine_labelvalues[engine], str(place)).set(value)
