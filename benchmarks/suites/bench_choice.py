"""Regret of the cost model over a grid of steps: is relay ever slower on this CPU?

    python benchmarks/suites/bench_choice.py --save

Every point is one step: requests in groups that share a prefix, each with tokens of its own and one
query token (decode), several (verification of drafts) or a chunk of a prompt (prefill); another
request's whole prompt beside them (mixed); layers with a window or sinks. Four ways are timed in
the engine's own worker, interleaved, with caches as in a model, until the medians of their ratios
are known to about 0.5 %: vLLM's backend; relay's backend with its cost model, unless that is one of
the others; relay's kernels without a group; and with every group. Planning is not in these times
(see `bench_planning.py`), nor is the packing of segments, which is done once the regret of steps
without it exceeds its cost.
"""

import argparse
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import OFFLINE, importable
from benchmarks.harness.random_model import write_random_model
from benchmarks.harness.result_csv import save
from benchmarks.harness.terminal import add_heads

WAYS = ("vLLM", "no groups", "groups")
# Bar: the least speed, as a part of vLLM's and of the best way's.
NEVER_SLOWER = 0.98
# Relative difference of outputs: rounding gives less, a wrong partial about 1.
AGREEMENT = 0.02


@dataclass(frozen=True, kw_only=True)
class Point:
    """One step; see `calibration.steps.Shape`, and for the layer `GridWorker.measure_choice`."""

    requests: int
    shared: int
    own: int
    queries: int = 1
    groups: int = 1
    prefill: int = 0
    window: int = 0
    sinks: bool = False

    @property
    def kind(self) -> str:
        if self.prefill:
            return "mixed"
        return "decode" if self.queries == 1 else "verify" if self.queries < 16 else "prefill"

    def shape(self) -> dict[str, int]:
        return {
            "rows": self.requests,
            "shared": self.shared,
            "own": self.own,
            "queries": self.queries,
            "groups": self.groups if self.shared else 0,
            "prefill": self.prefill,
        }


def grid() -> list[Point]:
    """Points, those of one kind of layer adjacent."""
    points = [
        Point(requests=requests, shared=shared, own=own, groups=groups)
        for requests in (1, 2, 8, 32, 128)
        for shared in (0, 512, 2048, 8192)
        for own in (16, 256, 2048)
        for groups in ((1, 4, 16) if shared and own != 256 else (1,))
        # A group of one shares nothing.
        if groups == 1 or requests >= 2 * groups
    ]
    points += [Point(requests=n, shared=0, own=16384) for n in (1, 2, 8)]
    points += [
        Point(requests=requests, shared=shared, own=own, queries=queries)
        for requests, shared, own, queries in (
            # drafts to verify
            *((8, 0, 512, 4), (8, 2048, 128, 4), (32, 0, 512, 4), (32, 2048, 128, 4)),
            *((8, 8192, 16, 8), (32, 512, 64, 8)),
            # prompts, whole and in chunks
            *((1, 0, n, n) for n in (16, 64, 256, 1024, 4096)),
            *((1, 0, 4096, 256), (1, 0, 4096, 1024), (1, 0, 16384, 512), (4, 0, 512, 512)),
            *((16, 0, 128, 128), (32, 0, 32, 32)),
            # prompts that extend a computed prefix
            *((n, shared, own, own) for n in (2, 8) for shared in (512, 4096) for own in (32, 256)),
            (32, 2048, 32, 32),
        )
    ]
    points += [
        Point(requests=requests, shared=shared, own=own, prefill=prefill)
        for requests in (8, 32)
        for shared, own in ((0, 512), (2048, 128), (8192, 16))
        for prefill in (256, 1024)
    ]
    of_layers = [
        Point(requests=requests, shared=shared, own=own)
        for requests in (1, 8, 32)
        for shared, own in ((0, 256), (0, 4096), (512, 64), (2048, 128), (8192, 128))
    ]
    of_layers += [Point(requests=1, shared=0, own=4096, queries=n) for n in (256, 1024)]
    of_layers += [Point(requests=8, shared=2048, own=64, queries=64)]
    return points + [
        replace(point, window=window, sinks=sinks)
        for window, sinks in ((128, True), (1024, False), (0, True))
        for point in of_layers
    ]


def row_of(point: Point, measured: dict[str, Any], heads: list[int]) -> dict[str, Any]:
    low, high = measured["quartiles"]
    # With a window the forest's columns start at 0 and the shape's at the first block seen.
    predicted = measured["shares"] and not point.window
    return {
        "query_heads": heads[0],
        "kv_heads": heads[1],
        "head_size": heads[2],
        "threads": measured["threads"],
        "kind": point.kind,
        "requests": point.requests,
        "shared_tokens": point.shared,
        "own_tokens": point.own,
        "queries": point.queries,
        "groups": point.groups,
        "prefill_tokens": point.prefill,
        "window": point.window,
        "sinks": point.sinks,
        "rounds": measured["rounds"],
        "stock_ms": round(measured["stock_ms"], 4),
        "relay_ms": round(measured["relay_ms"], 4),
        "alone_ms": round(measured["alone_ms"], 4),
        "always_ms": round(measured["always_ms"], 4) if measured["shares"] else "",
        "choice": measured["choice"],
        "ratio": round(measured["ratio"], 4),
        "ratio_q1": round(low, 4),
        "ratio_q3": round(high, 4),
        "of_best": round(measured["of_best"], 4),
        "predicted_stock_ms": round(measured["predicted_stock_ms"], 4),
        "predicted_alone_ms": round(measured["predicted_alone_ms"], 4),
        "predicted_always_ms": round(measured["predicted_always_ms"], 4) if predicted else "",
        "relative_difference": round(measured["relative_difference"], 6),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The two bars of the grid, and how far predictions are off."""
    off = sorted(abs(row["predicted_stock_ms"] / row["stock_ms"] - 1) for row in rows)
    return {
        "points": len(rows),
        **{f"choice: {way}": sum(row["choice"] == way for row in rows) for way in WAYS},
        "lowest, of vLLM's speed": min(row["ratio"] for row in rows),
        "lowest, of the best way's speed": min(row["of_best"] for row in rows),
        "points below 0.98 of vLLM's": sum(row["ratio"] < NEVER_SLOWER for row in rows),
        "points below 0.98 of the best": sum(row["of_best"] < NEVER_SLOWER for row in rows),
        "prediction of stock off by (median)": f"{off[len(off) // 2]:.0%}",
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Relay's speed over vLLM's at every point, by vLLM's time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for special, marker in ((False, "o"), (True, "^")):
            points = [
                row
                for row in rows
                if row["kind"] == kind and bool(row["window"] or row["sinks"]) == special
            ]
            axes.scatter(
                [row["stock_ms"] for row in points],
                [row["ratio"] for row in points],
                s=16,
                marker=marker,
                color=f"C{('decode', 'verify', 'prefill', 'mixed').index(kind)}",
                label=None if special else kind,
                alpha=0.7,
                linewidths=0,
            )
    axes.scatter([], [], s=16, marker="^", color="gray", label="with a window or sinks")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("vLLM's own attention of the step, ms per layer")
    axes.set_ylabel("relay's speed, vLLM's = 1")
    row = rows[0]
    axes.set_title(
        f"CPU attention, {row['query_heads']}/{row['kv_heads']} heads of {row['head_size']}, "
        f"{row['threads']} thread{'' if row['threads'] == 1 else 's'}, {len(rows)} steps",
        fontsize="medium",
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_heads(parser)
    parser.add_argument("--points", type=int, help="measure at most so many, evenly from the grid")
    parser.add_argument("--kv-gib", type=float, default=6, help="KV cache of the steps")
    parser.add_argument(
        "--save", action="store_true", help="write a CSV and a PNG to benchmarks/results"
    )
    args = parser.parse_args()
    console = Console()
    os.environ.update(OFFLINE | importable())
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # the steps have one of their own
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    points = grid()
    if args.points:
        points = points[:: -(-len(points) // args.points)]
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), *args.heads)
        llm = LLM(
            str(model),
            attention_backend="relay",
            worker_extension_cls="benchmarks.suites.choice_worker.GridWorker",
            hf_overrides={"num_hidden_layers": 2},
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=4096,
        )
        rows, too_large = [], 0
        with suppress(KeyboardInterrupt):  # Ctrl-C: what was measured so far is shown and saved
            for point in track(points, "timing", console=console, transient=True):
                given = (point.shape(), point.window, point.sinks, int(args.kv_gib * 2**30))
                measured = llm.collective_rpc("measure_choice", args=given)[0]
                if measured is None:
                    too_large += 1
                else:
                    rows.append(row_of(point, measured, args.heads))
    wrong = [row for row in rows if not row["relative_difference"] <= AGREEMENT]
    if wrong or not rows:
        console.print(f"[red]outputs differ, no speed is reported:[/] {wrong[:3]}", soft_wrap=True)
        return 1
    table = Table(title="Attention of a step: relay's speed", show_header=False)
    for name, value in summary(rows).items():
        table.add_row(name, str(value))
    console.print(table)
    if too_large:
        console.print(f"{too_large} points left out: the KV cache (--kv-gib) does not hold them")
    if args.save:
        plot(rows, save(console, "choice", rows).with_suffix(".png"))
    return int(any(min(row["ratio"], row["of_best"]) < NEVER_SLOWER for row in rows))


if __name__ == "__main__":
    sys.exit(main())
