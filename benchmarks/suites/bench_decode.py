"""Decode throughput of relay against vLLM's own backend on real, interleaved engines.

    python benchmarks/suites/bench_decode.py --shared 8192 2048 0 --save

``--also`` adds workloads with little to gain: one request alone, a short prefix, contexts much
longer than the prefix. ``--also-heads`` adds models: MHA, GQA and MQA side by side.

The model has 4 layers, by default with 16 query and 16 KV heads of size 128 (attention weighs most
in that shape), and random weights of realistic scale; ``--model`` takes a real one in its place.
``--shared 0`` is a batch with nothing shared: the plugin's overhead, and the throughput without a
prefix. Every measurement has two ceilings: an engine that skips attention (Hydragen's, arXiv
2402.05099), and the arithmetic of the prefix at the rate of a matrix product of the same run.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import Engine, Limits, engines
from benchmarks.harness.latin_square import (
    Measured,
    Round,
    Workload,
    add_options,
    checked,
    save_engines,
)
from benchmarks.harness.random_model import VOCABULARY, write_random_model
from benchmarks.harness.result_csv import Row
from benchmarks.harness.terminal import add_heads, at_least, make_console, step
from vllm_relay.serving.agreement import WrongAnswers

KEYS = ("stock", "relay", "no-attention")


def make_workload(requests: int, shared: int, own: int, steps: int, prefill: bool) -> Workload:
    """Requests under one prefix, the same in every round: with `prefill` not in any cache."""
    rng = np.random.default_rng(shared)
    prefix = rng.integers(3, VOCABULARY, shared).tolist()
    prompts = [prefix + rng.integers(3, VOCABULARY, own).tolist() for _ in range(requests)]

    def make_round(number: int) -> Round:
        return prompts, [steps] * requests

    columns = {"requests": requests, "shared_tokens": shared, "own_tokens": own}
    return Workload(columns, make_round, forget=prefill)


def row_of(
    model: Path, measured: Measured, workload: Workload, gemm_rate: float, args: argparse.Namespace
) -> Row:
    config = json.loads((model / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rates = measured.decode_tok_s
    ratios = [r / s for r, s in zip(rates["relay"], rates["stock"], strict=True)]
    stock, relay, ceiling = (statistics.median(rates[key]) for key in KEYS)
    gemm = gemm_rate / 1e9
    requests = workload.columns["requests"]
    attended = requests * workload.columns["shared_tokens"]
    operations = 4 * layers * heads * size * attended
    counted = measured.counted["relay"]
    spread = {
        f"{key}_step_ms_{name}": round(1e3 * requests / of(rates[key]), 3)
        for key in ("stock", "relay")
        for name, of in (("min", max), ("max", min))
    }
    return {
        "model": args.model.name if args.model else "random",
        "layers": layers,
        "query_heads": heads,
        "kv_heads": config["num_key_value_heads"],
        "head_size": size,
        **workload.columns,
        "steps": args.steps,
        "rounds": len(ratios),
        "stock_tok_s": round(stock, 2),
        "relay_tok_s": round(relay, 2),
        "no_attention_tok_s": round(ceiling, 2),
        "stock_step_ms": round(1e3 * requests / stock, 3),
        "relay_step_ms": round(1e3 * requests / relay, 3),
        "no_attention_step_ms": round(1e3 * requests / ceiling, 3),
        **spread,
        "prefix_ms_at_gemm_rate": round(operations / gemm / 1e6, 3),
        "gemm_gflop_s": round(gemm, 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        **(prefill_columns(measured.prefill_seconds) if args.prefill else {}),
        "steps_relayed": counted["steps_relayed"],
        "kv_gib_not_read": round(counted["kv_bytes_not_read"] / 2**30, 2),
        "logprob_rms": round(measured.distances["relay"].rms, 5),
        "logprob_worst": round(measured.distances["relay"].worst, 5),
    }


def measure(
    model: Path, given: Sequence[tuple[int, int, int]], args: argparse.Namespace, console: Console
) -> list[Row]:
    """A row for each of these workloads (requests, shared tokens, own tokens), by three engines.

    Raises:
        WrongAnswers: a system's answers are not the baseline's.
    """
    limits = Limits(
        max(shared + own for _, shared, own in given) + args.steps,
        max(requests for requests, _, _ in given),
        eager=args.eager,
    )
    settings = {} if args.min_saved_tokens is None else {"min_saved_tokens": args.min_saved_tokens}
    rows = []
    with ExitStack() as stack:
        with step(console, f"{len(KEYS)} engines") as report:
            started: dict[str, Engine] = stack.enter_context(
                engines(model, KEYS, limits, settings=settings, report=report)
            )
        for workload in (make_workload(*numbers, args.steps, args.prefill) for numbers in given):
            measured = checked(started, workload, args, console)
            rows.append(row_of(model, measured, workload, started["relay"].gemm_rate(), args))
    return rows


def prefill_columns(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians, and that of the ratio of relay's time to vLLM's."""
    stock, relay = seconds["stock"], seconds["relay"]
    return {
        "stock_prefill_s": round(statistics.median(stock), 4),
        "relay_prefill_s": round(statistics.median(relay), 4),
        "prefill_time_ratio": round(
            statistics.median(r / s for r, s in zip(relay, stock, strict=True)), 4
        ),
    }


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title="Decode throughput, tokens per second (medians)")
    for heading in (
        "heads",
        "requests",
        "shared",
        "own",
        "stock",
        "relay",
        "no attention",
        "ratio",
        "min to max",
        "KV not read",
        "logprob rms",
    ):
        table.add_column(heading, justify="right")
    prefill = "prefill_time_ratio" in rows[0]
    if prefill:
        table.add_column("prefill time", justify="right")
    for r in rows:
        table.add_row(
            f"{r['query_heads']}/{r['kv_heads']}",
            str(r["requests"]),
            f"{r['shared_tokens']:,}",
            f"{r['own_tokens']:,}",
            f"{r['stock_tok_s']:,.0f}",
            f"{r['relay_tok_s']:,.0f}",
            f"{r['no_attention_tok_s']:,.0f}",
            f"{r['ratio']:.3f}",
            f"{r['ratio_min']:.3f} to {r['ratio_max']:.3f}",
            f"{r['kv_gib_not_read']:,.1f} GiB",
            f"{r['logprob_rms']:.4f}",
            *([f"{r['prefill_time_ratio']:.3f}"] if prefill else []),
        )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shared",
        type=int,
        nargs="+",
        default=[8192, 2048, 0],
        help="shared tokens, one workload each",
    )
    parser.add_argument(
        "--own", type=int, default=64, help="tokens each request adds to the prefix"
    )
    parser.add_argument(
        "--requests",
        type=at_least(1),
        nargs="+",
        default=[32],
        help="each with every prefix (several, CSV: decode-requests)",
    )
    parser.add_argument(
        "--also",
        type=int,
        nargs=3,
        action="append",
        default=[],
        metavar=("REQUESTS", "SHARED", "OWN"),
        help="also this workload",
    )
    parser.add_argument(
        "--steps", type=at_least(3), default=48, help="tokens each request produces"
    )
    add_options(parser, repeats=7)
    add_heads(parser)
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of a real model (CSV: decode-model)",
    )
    parser.add_argument(
        "--also-heads",
        type=int,
        nargs=3,
        action="append",
        default=[],
        metavar=("QUERY", "KV", "SIZE"),
        help="also a random model with these heads (CSV: decode-heads)",
    )
    parser.add_argument("--min-saved-tokens", type=int, help="the setting of that name")
    parser.add_argument(
        "--prefill", action="store_true", help="time the prompts too: every round computes them"
    )
    args = parser.parse_args(argv)
    several = len(args.requests) > 1
    if several and (len(args.shared) > 1 or args.also or args.also_heads):
        parser.error("--requests: several need one --shared, and no --also or --also-heads")
    if args.also_heads and (args.also or args.model):
        parser.error("--also-heads: not with --also or --model")
    console = make_console()
    given = [(count, shared, args.own) for count in args.requests for shared in args.shared]
    given += map(tuple, args.also)
    rows = []
    try:
        for heads in (args.heads, *args.also_heads):
            with tempfile.TemporaryDirectory() as folder:
                model = args.model or write_random_model(Path(folder), *heads)
                rows += measure(model, given, args, console)
    except WrongAnswers as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    show(console, rows)
    if args.save:
        kinds = {"-requests": several, "-heads": args.also_heads, "-model": args.model}
        kind = next((name for name, applies in kinds.items() if applies), "")
        save_engines(console, f"decode{kind}", rows, args.eager)
    return 0


if __name__ == "__main__":
    sys.exit(main())
