"""``vllm-relay top``: what a server's engines share, from its ``/metrics``."""

import time
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from typing import Annotated, Any
from urllib.request import urlopen

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.live import Live
from rich.table import Table

from vllm_relay.cli.console import JsonFlag, one_line_errors, out

_PREFIX, _SUFFIX = "vllm:relay_", "_total"
# Seconds for an answer of the server.
_PATIENCE = 10.0

# Engine -> counter -> value; fallbacks of all reasons are one.
Counters = dict[str, dict[str, float]]


def top(
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://localhost:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look at one interval, and end.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what the requests of a running server share, per engine; Ctrl-C ends it."""
    with one_line_errors():
        if as_json and not once:
            raise ValueError("--json needs --once")
        before, since = _look(url), time.monotonic()
        if once:
            time.sleep(interval)
            engines = _rates(before, _look(url), time.monotonic() - since)
            out.print_json(data=engines) if as_json else out.print(_table(url, engines))
            return
        with Live(_table(url, {}), console=out) as live:
            while True:
                time.sleep(interval)
                now, at = _look(url), time.monotonic()
                live.update(_table(url, _rates(before, now, at - since)))
                before, since = now, at


def _look(url: str) -> Counters:
    """Relay's counters by engine. Raises ValueError for a URL without them, OSError."""
    place = f"{url.rstrip('/')}/metrics"
    try:
        with urlopen(place, timeout=_PATIENCE) as answer:
            text = answer.read().decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, HTTPException, ValueError) as error:
        raise ValueError(f"{place}: {error}") from error
    found: Counters = defaultdict(lambda: defaultdict(float))
    for family in families:
        for sample in family.samples if family.name.startswith(_PREFIX) else []:
            name = sample.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
            # System KVs have counters of their own, by prompt.
            if "prompt" not in sample.labels and "engine" in sample.labels:
                found[sample.labels["engine"]][name] += sample.value
    if not found:
        raise ValueError(f"{place}: has no counters of relay: is it the server's backend?")
    return found


def _rates(before: Counters, now: Counters, seconds: float) -> dict[str, dict[str, Any]]:
    """Counters since each engine's start, and per second or step of the last interval."""
    return {engine: _of_engine(now[engine], before.get(engine, {}), seconds)
            for engine in sorted(now)}  # fmt: skip


def _of_engine(now: Mapping[str, float], before: Mapping[str, float], seconds: float) -> Any:
    # An engine that was restarted counts from 0.
    new = {name: value - before.get(name, 0) for name, value in now.items()}
    if any(value < 0 for value in new.values()):
        new = dict(now)

    def ratio(name: str, of: str) -> float | None:
        return round(new[name] / new[of], 3) if new[of] else None

    return {
        "steps_per_s": round(new["steps"] / seconds, 1),
        "relayed": ratio("steps_relayed", "steps"),
        "groups_per_step": ratio("groups", "steps_relayed"),
        "requests_per_step": ratio("requests", "steps_relayed"),
        "tokens_shared_per_step": ratio("tokens_shared", "steps_relayed"),
        "kv_bytes_not_read_per_s": round(new["kv_bytes_not_read"] / seconds),
        "total": {name: int(value) for name, value in sorted(now.items())},
    }


def _table(url: str, engines: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=url, box=box.SIMPLE, title_justify="left", padding=0, show_edge=False)
    names = ("engine", "steps/s", "relayed", "groups", "requests", "tokens", "GB/s", "GB")
    for name in (*names, "fallbacks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.caption = "requests and tokens that share, per relayed step; GB of KV not read"
    for engine, found in engines.items():
        total, relayed = found["total"], found["relayed"]
        table.add_row(
            engine,
            f"{found['steps_per_s']:,.1f}",
            "-" if relayed is None else f"{relayed:.0%}",
            *(_shown(found[f"{x}_per_step"]) for x in ("groups", "requests", "tokens_shared")),
            f"{found['kv_bytes_not_read_per_s'] / 1e9:,.1f}",
            f"{total['kv_bytes_not_read'] / 1e9:,.0f}",
            f"{total.get('fallbacks', 0):,}",
        )
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
