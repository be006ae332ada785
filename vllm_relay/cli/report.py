"""The results of `explain`, for people, as JSON and as a web page."""

from base64 import b64encode
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_relay.explain.replay import Replay
from vllm_relay.explain.trace import Trace

# Segments shown, and in JSON.
SHOWN, LISTED = 10, 100
# The first eight are the public surface.
TOTALS = (
    *("requests", "steps", "kv_tokens_stock", "kv_tokens_relay", "kv_tokens_once", "saved"),
    *("predicted_speedup", "levels_used", "concurrency", "steps_relayed"),
)
# rich's ``code_format``; the page loads nothing.
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>TITLE</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ margin: 2rem auto; max-width: 66rem; padding: 0 1.5rem; }}
  pre {{ font: 15px/1.35 ui-monospace, "DejaVu Sans Mono", monospace; overflow-x: auto; }}
  img {{ width: 100%; background: white; }}
</style>
<pre>{code}</pre>
FIGURE
</html>
"""


def as_page(console: Console, title: str, figure: bytes) -> str:
    """One HTML file of a recording console's output and a PNG."""
    data = b64encode(figure).decode()
    image = f'<img alt="KV reads over time" src="data:image/png;base64,{data}">'
    # Braces are rich's.
    heading = escape(title).replace("{", "{{").replace("}", "}}")
    page = _PAGE.replace("TITLE", heading).replace("FIGURE", image)
    return console.export_html(code_format=page, inline_styles=True)


def as_data(result: Replay, log: Trace, used: dict[str, Any]) -> dict[str, Any]:
    """One replay as JSON; ``used``: the costs and options behind it."""
    place = ("start", "tokens", "level", "members", "steps")
    groups = [
        {name: getattr(group, name) for name in place}
        | {"kv_tokens_saved": group.saved, "first_line": group.first.line}
        for group in result.groups[:LISTED]
    ]
    return {name: getattr(result, name) for name in TOTALS} | {
        "block_tokens": log.block_tokens,
        "reasons": asdict(result.reasons),
        "groups": groups,
        "costs": used,
    }


def show(
    page: Console,
    results: list[Replay],
    reordered: list[Replay],
    log: Trace,
    path: Path,
    source: str,
    *,
    objective: str,
    max_levels: str,
) -> None:
    """Print replays of one trace beside each other on a page, then the groups of each.

    Args:
        reordered: the same replays in another order of requests; empty if there are none.
    """
    count = len(log.requests)
    mean = sum(request.input_length for request in log.requests) / count
    page.print(
        f"{path.name}: {count:,} request{'' if count == 1 else 's'}, {mean:,.0f} prompt tokens on "
        f"average, {log.block_tokens:,} tokens per block"
    )
    aim = {"time": "least time", "reads": "fewest KV reads"}[objective]
    levels = "all levels" if max_levels == "all" else f"{max_levels} levels at most"
    page.print(f"decode steps only; groups are chosen for the {aim}, {levels}")
    page.print(f"{source}\n")
    page.print("KV tokens read per layer, in all decode steps", style="bold")
    page.print(_totals(results, reordered))
    page.print("Where the reads of vLLM's attention go, and why they stay", style="bold")
    page.print(_where_reads_go(results, objective, max_levels))
    for result in results:
        title = f"Who shares what, {result.concurrency:,} at once"
        if len(result.groups) > SHOWN:
            title += f": {SHOWN} of {len(result.groups):,} segments, those that save most"
        page.print(title, style="bold")
        page.print(_groups(result) if result.groups else f"  {_why_none(result)}\n")


def gain(given: Replay, reordered: Replay) -> float:
    """Predicted time of attention with relay in the given order, over that in another."""
    return given.seconds_relay / reordered.seconds_relay if reordered.seconds_relay else 1.0


def _why_none(result: Replay) -> str:
    if not result.steps:
        return "nothing: no request generates a token"
    if not result.savable:
        return "nothing: no two requests that run at once have a full block in common"
    return f"nothing that pays: {_percent(result.savable)} of KV reads are repeated"


def _table(results: list[Replay], rows: dict[str, list[str]]) -> Table:
    """Named rows with one cell per replay."""
    table = Table("requests at once", box=box.SIMPLE_HEAD, pad_edge=False)
    for result in results:
        table.add_column(f"{result.concurrency:,}", justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells, style="bold" if name == "KV reads saved" else None)
    return table


def _totals(results: list[Replay], reordered: list[Replay]) -> Table:
    rows = {
        "decode steps": [f"{r.steps:,}" for r in results],
        "  with groups": [_share(r.steps_relayed, r.steps) for r in results],
        "levels used": [str(r.levels_used) for r in results],
        "read by vLLM's attention": [_tokens(r.kv_tokens_stock) for r in results],
        "read with relay": [_tokens(r.kv_tokens_relay) for r in results],
        "each shared block once": [_tokens(r.kv_tokens_once) for r in results],
        "KV reads saved": [_percent(r.saved) for r in results],
        "attention, predicted": [f"{r.predicted_speedup:.2f} x as fast" for r in results],
    }
    if reordered:
        rows["reordered: KV reads saved"] = [_percent(r.saved) for r in reordered]
        rows["  each shared block once"] = [_tokens(r.kv_tokens_once) for r in reordered]
        pairs = list(zip(results, reordered, strict=True))
        rows["  attention, to given order"] = [f"{gain(a, b):.2f} x as fast" for a, b in pairs]
    return _table(results, rows)


def _where_reads_go(results: list[Replay], objective: str, max_levels: str) -> Table:
    why = ["no group pays"] if objective == "time" else []
    why += [f"--max-levels {max_levels}"] if max_levels != "all" else []
    words = {
        "saved": "shared: saved",
        "first_reads": "shared: the one read that is needed",
        "repeated": "shared: repeated" + (f", {' or '.join(why)}" if why else ""),
        "other_times": "in other requests, at other times",
        "own": "in no other request",
        "generated": "generated by the request itself",
    }
    rows = {
        text: [_share(getattr(r.reasons, name), r.kv_tokens_stock) for r in results]
        for name, text in words.items()
    }
    return _table(results, rows)


def _groups(result: Replay) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tokens", "from token", "level", "requests", "steps", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first request")  # the one to be cut where there is not room for all
    for group in result.groups[:SHOWN]:
        text = " ".join((group.first.text or "").split())[:80]
        first = f"line {group.first.line:,}" + (f": {text}" if text else "")
        table.add_row(
            f"{group.tokens:,}",
            f"{group.start:,}",
            str(group.level),
            f"{group.members:,}",
            f"{group.steps:,}",
            _share(group.saved, result.kv_tokens_stock),
            Text(first, no_wrap=True, overflow="ellipsis"),
        )
    return table


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _share(part: int, whole: int) -> str:
    return _percent(part / whole) if whole else "-"


def _tokens(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.{2 if count < 10 * size else 1}f} {unit}"
    return str(count)
