"""Sharing in a real trace: `vllm-relay explain` at several batch sizes.

    python benchmarks/suites/bench_trace.py conversation_trace.jsonl --save

Each row is one replay. Objective "reads" gives the most that sharing could save, "time" what relay
would do on this machine by its predicted attention time.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import RESULTS
from benchmarks.harness.result_csv import save
from vllm_relay.serving.processes import beside_python

KEYS = ("requests", "steps", "kv_tokens_stock", "kv_tokens_relay", "kv_tokens_once")


def replay(trace: Path, objective: str, args: argparse.Namespace, plot: Path | None) -> list[Any]:
    command = beside_python("vllm-relay", "explain", str(trace), "--json")
    command += ["--objective", objective, "--max-levels", args.max_levels]
    for count in args.concurrency:
        command += ["--concurrency", str(count)]
    for name, value in zip(("heads", "kv-heads", "head-size"), args.heads, strict=True):
        command += [f"--{name}", str(value)]
    if plot is not None:
        command += ["--plot", str(plot)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    data = json.loads(done.stdout)
    return data if isinstance(data, list) else [data]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--objective", nargs="+", default=["reads", "time"])
    parser.add_argument("--max-levels", default="3")
    parser.add_argument(
        "--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("QUERY", "KV", "SIZE")
    )
    parser.add_argument(
        "--save", action="store_true", help="write a CSV and a PNG to benchmarks/results"
    )
    args = parser.parse_args()
    console = Console()
    plot = RESULTS / "trace.png" if args.save else None
    plotted = args.objective[0]
    rows = []
    for objective in args.objective:
        drawn = plot if objective == plotted else None
        for count, data in zip(
            args.concurrency, replay(args.trace, objective, args, drawn), strict=True
        ):
            row = {"trace": args.trace.name, "objective": objective, "concurrency": count}
            row |= {key: data[key] for key in KEYS}
            row |= {
                "saved": round(data["saved"], 5),
                "predicted_speedup": round(data["predicted_speedup"], 4),
                "levels_used": data["levels_used"],
                "max_levels": args.max_levels,
                "heads": "/".join(map(str, args.heads)),
                "costs": data["costs"]["source"],
            }
            rows.append(row)
            console.print(
                f"{objective}, {count:,} at once: {row['saved']:.1%} of KV reads saved, attention "
                f"{row['predicted_speedup']:.3f} x as fast (predicted)",
                highlight=False,
            )
    if plot is not None:
        plot.replace(save(console, "trace", rows).with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
