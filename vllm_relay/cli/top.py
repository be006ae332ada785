"""``vllm-relay top``: what a server's engines share right now, in the terminal or as a page."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table

from vllm_relay.cli.console import JsonFlag, one_line_errors, out
from vllm_relay.cli.page import serve_page
from vllm_relay.monitoring.scrape import Scraper

Engines = Mapping[str, Mapping[str, Any]]


def top(
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://localhost:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look at one interval, and end.")] = False,
    as_json: JsonFlag = False,
    page: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve a web page instead; HOST: 127.0.0.1."),
    ] = None,
) -> None:
    """Show what the requests of a running server share, per engine; Ctrl-C ends it."""
    with one_line_errors():
        if as_json and not once:
            raise ValueError("--json needs --once")
        if page is not None and once:
            raise ValueError("--page is served until Ctrl-C: leave out --once")
        scraper = Scraper(url)
        if page is not None:
            serve_page(page, url, scraper.engines, interval)
        elif once:
            time.sleep(interval)
            engines = scraper.engines()
            out.print_json(data=engines) if as_json else out.print(_shown(url, engines))
        else:
            with Live(_shown(url, {}), console=out) as live:
                while True:
                    time.sleep(interval)
                    live.update(_shown(url, scraper.engines()))


def _shown(url: str, engines: Engines) -> Group:
    tables = [_table(url, engines)]
    for engine, found in engines.items():
        tables += [_groups(engine, found["groups"]), _hot(engine, found["hot_prefixes"])]
    return Group(*(table for table in tables if table.row_count or table is tables[0]))


def _table(url: str, engines: Engines) -> Table:
    table = _titled(url)
    names = ("engine", "steps/s", "relayed", "groups", "requests", "tokens", "GB/s", "saved")
    for name in (*names, "planning", "fallbacks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.caption = (
        "per relayed step: groups, requests, tokens that they share; KV not read; share of the time"
        " saved (predicted) and spent on planning"
    )
    for engine, found in engines.items():
        relayed = found["relayed"]
        table.add_row(
            engine,
            f"{found['steps_per_s']:,.1f}",
            "-" if relayed is None else f"{relayed:.0%}",
            *(_number(found[f"{x}_per_step"]) for x in ("groups", "requests", "tokens_shared")),
            f"{found['kv_bytes_not_read_per_s'] / 1e9:,.1f}",
            f"{found['predicted_saved_share']:.0%}",
            f"{found['planning_share']:.1%}",
            f"{found['total'].get('fallbacks', 0):,.0f}",
        )
    return table


def _groups(engine: str, groups: list[dict[str, int]]) -> Table:
    """Groups of the latest step, those inside of another below it."""
    table = _titled(f"engine {engine}: groups of the latest step")
    for name, justify in (("level", "left"), ("requests", "right"), ("tokens", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("KV tokens not read", justify="right")
    for group in groups:
        level, requests, tokens = group["level"], group["requests"], group["tokens"]
        indent = "  " * level + ("└ " if level else "")
        table.add_row(
            f"{indent}{level}", f"{requests:,}", f"{tokens:,}", f"{(requests - 1) * tokens:,}"
        )
    return table


def _hot(engine: str, prefixes: list[dict[str, float]]) -> Table:
    """Hot prefixes, the hottest first."""
    table = _titled(f"engine {engine}: hottest prefixes")
    for name in ("requests of late", "tokens"):
        table.add_column(name, justify="right")
    for prefix in prefixes:
        table.add_row(f"{prefix['requests']:,.1f}", f"{prefix['tokens']:,.0f}")
    return table


def _titled(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE, title_justify="left", padding=0, show_edge=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
