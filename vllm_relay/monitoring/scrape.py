"""Rates and groups of a server's engines, read from its ``/metrics``, one look after another."""

import time
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

_PREFIX, _SUFFIX = "vllm:relay_", "_total"
_GROUP, _HOT = "group_", "hot_prefix_"
# Seconds for an answer of the server.
_PATIENCE = 10.0

Values = Mapping[str, float]
Group = dict[str, int]
# By engine: "groups" and "hot_prefixes", whose gauges have a place each.
Lists = dict[str, dict[str, Any]]


class Scraper:
    """Looks at a server's ``/metrics``, one after the other.

    Args:
        url: of the server.

    Raises:
        ValueError: the URL has no metrics of relay.
    """

    def __init__(self, url: str) -> None:
        self._place = f"{url.rstrip('/')}/metrics"
        self._values, self._lists = self._look()
        self._at = time.monotonic()

    def engines(self) -> dict[str, dict[str, Any]]:
        """By engine: rates since the last look, counters since its start, and lists of now.

        ``groups`` are those of `vllm_relay.metrics.groups`, ``hot_prefixes`` those of the newest
        round of ``remember``: requests of late and tokens. Ratios of nothing are None.

        Raises:
            ValueError: as `Scraper`.
        """
        before, since = self._values, self._at
        self._values, self._lists = self._look()
        self._at = time.monotonic()
        return {
            engine: _rates(values, before.get(engine, {}), self._at - since) | self._lists[engine]
            for engine, values in sorted(self._values.items())
        }

    def _look(self) -> tuple[dict[str, Values], Lists]:
        """Counters and gauges by engine, fallbacks of all reasons as one; and lists."""
        try:
            with urlopen(self._place, timeout=_PATIENCE) as answer:
                text = answer.read().decode()
            families = list(text_string_to_metric_families(text))
        except (OSError, HTTPException, ValueError) as error:
            raise ValueError(f"{self._place}: {error}") from error
        values: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        groups: dict[str, dict[int, Group]] = defaultdict(lambda: defaultdict(dict))
        hot: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for family in families:
            for sample in family.samples if family.name.startswith(_PREFIX) else []:
                name = sample.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
                engine = sample.labels.get("engine")
                # System KVs have counters of their own, by prompt.
                if engine is None or "prompt" in sample.labels:
                    continue
                if name.startswith(_GROUP):
                    group = groups[engine][int(sample.labels["place"])]
                    group["level"] = int(sample.labels["level"])
                    group[name.removeprefix(_GROUP)] = int(sample.value)
                elif name.startswith(_HOT):
                    place = int(sample.labels["place"])
                    hot[engine][place][name.removeprefix(_HOT)] = sample.value
                else:
                    values[engine][name] += sample.value
        if not values:
            raise ValueError(
                f"{self._place}: has no counters of relay: is it the server's backend?"
            )
        lists = {
            engine: {
                "groups": [group for _, group in sorted(groups[engine].items())],
                # Places that had one before are 0.
                "hot_prefixes": [x for _, x in sorted(hot[engine].items()) if x["tokens"]],
            }
            for engine in values
        }
        return dict(values), lists


def _rates(now: Values, before: Values, seconds: float) -> dict[str, Any]:
    # An engine that was restarted counts from 0.
    restarted = any(now[name] < before.get(name, 0) for name in now if name != "packed_bytes")
    new = {name: value - (0 if restarted else before.get(name, 0)) for name, value in now.items()}

    def ratio(name: str, of: str) -> float | None:
        return round(new[name] / new[of], 3) if new[of] else None

    return {
        "steps_per_s": round(new["steps"] / seconds, 1),
        "relayed": ratio("steps_relayed", "steps"),
        "groups_per_step": ratio("groups", "steps_relayed"),
        "requests_per_step": ratio("requests", "steps_relayed"),
        "tokens_shared_per_step": ratio("tokens_shared", "steps_relayed"),
        "kv_bytes_not_read_per_s": round(new["kv_bytes_not_read"] / seconds),
        "predicted_saved_share": round(new["predicted_saved_seconds"] / seconds, 4),
        "planning_share": round(new["planning_seconds"] / seconds, 4),
        "total": {name: round(value, 6) for name, value in sorted(now.items())},
    }
