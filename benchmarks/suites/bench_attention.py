"""CPU attention kernels: vLLM's, PyTorch's and relay's, beside the ceilings of the machine.

    python benchmarks/suites/bench_attention.py --save

All kernels attend to the same KV blocks of a running engine, interleaved, with cold caches; errors
are against float32. The ceilings (PyTorch's bf16 matrix product, memory reads) are of the same run.

Then whole steps of vLLM's attention and relay's, interleaved, with caches flushed and warm, beside
the prediction of eq. 10 of the RelayAttention paper (arXiv 2402.14808): 32 requests with 128 tokens
of context each, as in the paper's benchmark, by prefix length.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import KV_BLOCK, engine_environment
from benchmarks.harness.latin_square import save_engines
from benchmarks.harness.random_model import write_random_model
from benchmarks.harness.roofline import theoretical_speed_up
from benchmarks.harness.terminal import add_save, make_console
from vllm_relay.lifetime import ended_in_order

HEADS = [(16, 16, 128), (32, 8, 128), (9, 3, 64)]
PREFIX = 8192
RAGGED = sorted(random.Random(0).randint(1, 2048) for _ in range(32))
# Context lengths of the requests, and query tokens of each.
CONTEXTS = {
    "32 x 1,024": ([1024] * 32, 1),
    "32 x 64": ([64] * 32, 1),
    "1 to 2,048": (RAGGED, 1),
    "8 x 1,024, 4 queries": ([1024] * 8, 4),
    "8 x 1,024, 8 queries": ([1024] * 8, 8),
    "8 x 2,048": ([2048] * 8, 1),
    "2 x 1,024, 256 queries": ([1024] * 2, 256),
    "1 x 4,096, all queries": ([4096], 4096),
}
# Whole steps: requests and context tokens of each, as in the paper's benchmark.
STEP = (32, 128)
STEP_PREFIXES = (128, 256, 512, 1024, 2048, 4096, 8192)
# Largest error accepted, as a multiple of the error of vLLM's kernel (rms against float32).
WRONG = 3.0


# Part and name.
CASES = [("prefix", f"32 x {PREFIX:,}"), *(("contexts", name) for name in CONTEXTS)]


def rows_of(
    part: str, name: str, heads: tuple[int, int, int], measured: Any, ceiling: Any
) -> list[dict[str, Any]]:
    query_heads, kv_heads, size = heads
    lens, queries = ([PREFIX] * 32, 1) if part == "prefix" else CONTEXTS[name]
    # causal: a row's query i does not see the tokens of those after it
    pairs = sum(n * queries - queries * (queries - 1) // 2 for n in lens)
    operations = 4 * query_heads * size * pairs
    read = 2 * 2 * kv_heads * size * (PREFIX if part == "prefix" else sum(lens))
    stock, usual = (next(iter(measured.values()))[name] for name in ("seconds", "rms_error"))
    rows = []
    for way, found in measured.items():
        seconds = found["seconds"]
        rows.append(
            {
                "part": part,
                "case": name,
                "way": way,
                "query_heads": query_heads,
                "kv_heads": kv_heads,
                "head_size": size,
                "threads": ceiling["threads"],
                "ms": round(1e3 * seconds, 4),
                "ms_min": round(1e3 * found["least"], 4),
                "ms_max": round(1e3 * found["most"], 4),
                "gflop_s": round(operations / seconds / 1e9, 1),
                "gb_s": round(read / seconds / 1e9, 4),
                "times_as_fast_as_vllm": round(stock / seconds, 3),
                "of_gemm": round(operations / seconds / 1e9 / ceiling["gemm_gflop_s"], 3),
                "of_read": round(read / seconds / 1e9 / ceiling["read_gb_s"], 3),
                "gemm_gflop_s": round(ceiling["gemm_gflop_s"], 1),
                "read_gb_s": round(ceiling["read_gb_s"], 2),
                "rms_error": f"{found['rms_error']:.2e}",
                "times_vllms_error": round(found["rms_error"] / usual, 3),
                "instructions": ceiling["instructions"],
            }
        )
    return rows


def step_rows(
    prefix: int, heads: tuple[int, int, int], threads: int, measured: Any
) -> list[dict[str, Any]]:
    """CSV rows of a whole step, vLLM's attention against relay's: caches flushed, caches warm.

    ``unshared_ms``: relay's kernels, nothing shared; ``by_sharing``: times that in relay's.
    """
    requests, context = STEP
    rows = []
    for caches, seconds in measured["seconds"].items():
        stock, relay, alone = seconds
        ratios = [a / b for a, b in zip(stock, relay, strict=True)]
        of_sharing = [a / b for a, b in zip(alone, relay, strict=True)]
        rows.append(
            {
                "part": "step",
                "case": f"{requests} x {prefix:,} + {context}",
                "way": "relay",
                "query_heads": heads[0],
                "kv_heads": heads[1],
                "head_size": heads[2],
                "threads": threads,
                "requests": requests,
                "prefix_tokens": prefix,
                "context_tokens": context,
                "caches": caches,
                "ms": round(1e3 * statistics.median(relay), 4),
                "stock_ms": round(1e3 * statistics.median(stock), 4),
                "unshared_ms": round(1e3 * statistics.median(alone), 4),
                "times_as_fast_as_vllm": round(statistics.median(ratios), 3),
                "times_min": round(min(ratios), 3),
                "times_max": round(max(ratios), 3),
                "by_sharing": round(statistics.median(of_sharing), 3),
                "by_sharing_min": round(min(of_sharing), 3),
                "by_sharing_max": round(max(of_sharing), 3),
                "eq_10": round(theoretical_speed_up(requests, prefix, context), 3),
                "times_vllms_error": round(
                    max(measured["rms_error"].values()) / measured["rms_error"]["vLLM"], 3
                ),
            }
        )
    return rows


@contextmanager
def engine(heads: tuple[int, int, int]) -> Iterator[Any]:
    """One with a model of these heads."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write_random_model(Path(folder), *heads)),
            attention_backend="relay",
            worker_extension_cls="benchmarks.suites.attention_worker.AttentionWorker",
            hf_overrides={"num_hidden_layers": 2},
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=PREFIX,
            num_gpu_blocks_override=1 + PREFIX // KV_BLOCK,  # steps are timed on a cache of theirs
            additional_config={"relay": {"min_saved_tokens": 0}},
        )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def measure(
    llm: Any,
    heads: tuple[int, int, int],
    threads: int,
    cases: Sequence[tuple[str, str]],
    steps: Sequence[int],
    rounds: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Rows of the kernels' cases and of whole steps with these prefixes."""
    rows = []
    title = f"{heads[0]}/{heads[1]} heads of {heads[2]}, {threads} threads"
    for part, name in track(cases, title, console=console, transient=True):
        before = llm.collective_rpc("measure_ceilings")[0]
        given = (32, PREFIX) if part == "prefix" else CONTEXTS[name]
        measured = llm.collective_rpc(f"measure_{part}", args=(*given, rounds))[0]
        after = llm.collective_rpc("measure_ceilings")[0]
        # A machine that is shared is held up at times: a ceiling is the better of the two.
        ceiling = before | {x: max(before[x], after[x]) for x in ("gemm_gflop_s", "read_gb_s")}
        rows += rows_of(part, name, heads, measured, ceiling)
    for prefix in track(steps, "whole steps", console=console, transient=True):
        measured = llm.collective_rpc("measure_speed_up", args=(STEP[0], prefix, STEP[1], rounds))
        rows += step_rows(prefix, heads, threads, measured[0])
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9, help="of each case")
    add_save(parser)
    parser.add_argument(
        "--heads", type=int, nargs=3, action="append", metavar=("QUERY", "KV", "SIZE"),
        help="of a model; repeat it for several",
    )  # fmt: skip
    parser.add_argument("--contexts", nargs="*", choices=list(CONTEXTS), default=list(CONTEXTS))
    parser.add_argument(
        "--steps", type=int, nargs="*", default=list(STEP_PREFIXES),
        help="prefixes of whole steps, with the first heads and the fewest threads",
    )  # fmt: skip
    args = parser.parse_args(argv)
    console = make_console()
    shapes = list(map(tuple, args.heads or HEADS))
    cases = [case for case in CASES if case[0] == "prefix" or case[1] in args.contexts]
    cores = sorted(os.sched_getaffinity(0))[: max(args.threads)]
    if len(cores) < max(args.threads):
        parser.error(f"--threads: this machine has {len(cores)} cores")
    if bad := [x for x in args.steps if x < KV_BLOCK or x % KV_BLOCK]:
        parser.error(f"--steps: {bad[0]} is no multiple of {KV_BLOCK}, the tokens of a KV block")
    rows: list[dict[str, Any]] = []
    with ended_in_order(), engine_environment():
        for heads, threads in itertools.product(shapes, args.threads):
            # An engine's threads are what it was started with.
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[:threads]))
            steps = args.steps if (heads, threads) == (shapes[0], min(args.threads)) else []
            with engine(heads) as llm:
                rows += measure(llm, heads, threads, cases, steps, args.rounds, console)
    wrong = [row for row in rows if not float(row["times_vllms_error"]) <= WRONG]
    if wrong:
        console.print(f"[red]outputs differ, no speed is reported:[/] {wrong[:3]}", soft_wrap=True)
        return 1
    show(console, rows)
    if args.save:
        save_engines(console, "attention", rows, eager=True, dtype="auto")
    return 0


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="Attention of one layer (medians)")
    for heading in (
        "heads",
        "case",
        "threads",
        "way",
        "ms",
        "GFLOP/s",
        "GB/s",
        "of GEMM",
        "of read",
    ):
        table.add_column(
            heading, justify="left" if heading in ("heads", "case", "way") else "right"
        )
    for row in rows:
        if row["part"] == "step":
            continue
        table.add_row(
            f"{row['query_heads']}/{row['kv_heads']}/{row['head_size']}",
            row["case"], str(row["threads"]), row["way"], f"{row['ms']:.2f}",
            f"{row['gflop_s']:.0f}", f"{row['gb_s']:.1f}", f"{row['of_gemm']:.0%}",
            f"{row['of_read']:.0%}",
        )  # fmt: skip
    console.print(table)
    steps = Table(title=f"Attention of whole steps, {STEP[0]} requests (medians)")
    for heading in (
        "prefix",
        "caches",
        "vLLM ms",
        "unshared ms",
        "relay ms",
        "times vLLM",
        "least to most",
        "by sharing",
        "eq. 10",
    ):
        steps.add_column(heading, justify="right")
    for row in rows:
        if row["part"] == "step":
            steps.add_row(
                f"{row['prefix_tokens']:,}", row["caches"], f"{row['stock_ms']:.2f}",
                f"{row['unshared_ms']:.2f}", f"{row['ms']:.2f}",
                f"{row['times_as_fast_as_vllm']:.2f}",
                f"{row['times_min']:.2f} to {row['times_max']:.2f}", f"{row['by_sharing']:.2f}",
                f"{row['eq_10']:.2f}",
            )  # fmt: skip
    console.print(steps)


if __name__ == "__main__":
    sys.exit(main())
