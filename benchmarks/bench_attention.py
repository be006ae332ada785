"""Attention kernels on a CPU: vLLM's, PyTorch's and ours, and what the machine can do at most.

    python benchmarks/bench_attention.py --save

Every way attends to the same KV blocks of a running engine, with cold caches, in turns; errors are
against float32. Ceilings (PyTorch's bf16 matrix product, reading memory) are of the same run.
"""

import argparse
import itertools
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import OFFLINE, ROOT, provenance, write_csv
from benchmarks.random_model import write_random_model

HEADS = [(16, 16, 128), (32, 8, 128), (9, 3, 64)]
PREFIX = 8192
RAGGED = sorted(random.Random(0).randint(1, 2048) for _ in range(32))
# Requests' contexts and query tokens of each.
CONTEXTS = {
    "32 x 1,024": ([1024] * 32, 1),
    "32 x 64": ([64] * 32, 1),
    "1 to 2,048": (RAGGED, 1),
    "8 x 1,024, 4 queries": ([1024] * 8, 4),
    "8 x 1,024, 8 queries": ([1024] * 8, 8),
    "2 x 1,024, 256 queries": ([1024] * 2, 256),
}
# Times the error of vLLM's own kernel, root mean square against float32.
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
                "gflop_s": round(operations / seconds / 1e9, 1),
                "gb_s": round(read / seconds / 1e9, 2),
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


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The prefix against the matrix product, contexts against reading, on the fewest threads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    least = min(row["threads"] for row in rows)
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, part, unit, ceiling, title in (
        (panels[0], "prefix", "gflop_s", "gemm_gflop_s", "Prefix, 32 x 8,192 tokens, GFLOP/s"),
        (panels[1], "contexts", "gb_s", "read_gb_s", "Contexts, 32 x 1,024 tokens, GB/s"),
    ):
        shown = [
            row
            for row in rows
            if row["part"] == part
            and row["threads"] == least
            and (part == "prefix" or row["case"] == "32 x 1,024")
        ]
        ways = list(dict.fromkeys(row["way"] for row in shown))
        shapes = list(
            dict.fromkeys((r["query_heads"], r["kv_heads"], r["head_size"]) for r in shown)
        )
        width = 0.8 / len(ways)
        for index, way in enumerate(ways):
            values = [row[unit] for row in shown if row["way"] == way]
            places = [i + (index - (len(ways) - 1) / 2) * width for i in range(len(values))]
            axes.bar(places, values, width, label=way)
        most = [next(r[ceiling] for r in shown if r["query_heads"] == s[0]) for s in shapes]
        for i, value in enumerate(most):
            axes.plot(
                [i - 0.45, i + 0.45], [value] * 2, color="black", linewidth=1,
                label=("matrix product" if part == "prefix" else "reading") if not i else None,
            )  # fmt: skip
        axes.set_xticks(range(len(shapes)), [f"{a}/{b} heads of {c}" for a, b, c in shapes])
        axes.set_title(title, fontsize="medium")
        axes.set_ylim(0, 1.45 * max(most))
        axes.legend(frameon=False, fontsize="small", ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def start(heads: tuple[int, int, int]) -> Any:
    """An engine with a model of these heads."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        return LLM(
            str(write_random_model(Path(folder), *heads)),
            attention_backend="relay",
            worker_extension_cls="benchmarks.attention_worker.AttentionWorker",
            hf_overrides={"num_hidden_layers": 2},
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=PREFIX,
            additional_config={"relay": {"min_saved_tokens": 0}},
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9, help="of each case")
    parser.add_argument("--save", action="store_true", help="write a CSV and a plot to results")
    args = parser.parse_args()
    console = Console()
    cores = sorted(os.sched_getaffinity(0))[: max(args.threads)]
    if len(cores) < max(args.threads):
        parser.error(f"--threads: this machine has {len(cores)} cores")
    # The worker imports this folder's modules by name.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(OFFLINE | {"PYTHONPATH": os.pathsep.join(paths)})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rows: list[dict[str, Any]] = []
    for heads, threads in itertools.product(HEADS, args.threads):
        # An engine's threads are what it was started with.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[:threads]))
        title = f"{heads[0]}/{heads[1]} heads of {heads[2]}, {threads} threads"
        llm = start(heads)
        for part, name in track(CASES, title, console=console, transient=True):
            before = llm.collective_rpc("measure_ceilings")[0]
            given = (32, PREFIX) if part == "prefix" else CONTEXTS[name]
            measured = llm.collective_rpc(f"measure_{part}", args=(*given, args.rounds))[0]
            after = llm.collective_rpc("measure_ceilings")[0]
            # A machine that is shared is held up at times: a ceiling is the better of the two.
            ceiling = before | {x: max(before[x], after[x]) for x in ("gemm_gflop_s", "read_gb_s")}
            rows += rows_of(part, name, heads, measured, ceiling)
        del llm
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
        table.add_row(
            f"{row['query_heads']}/{row['kv_heads']}/{row['head_size']}",
            row["case"], str(row["threads"]), row["way"], f"{row['ms']:.2f}",
            f"{row['gflop_s']:.0f}", f"{row['gb_s']:.1f}", f"{row['of_gemm']:.0%}",
            f"{row['of_read']:.0%}",
        )  # fmt: skip
    console.print(table)
    wrong = [row for row in rows if not float(row["times_vllms_error"]) <= WRONG]
    if wrong:
        console.print(f"[red]outputs differ, no speed is reported:[/] {wrong[:3]}")
        return 1
    if args.save:
        path = write_csv(ROOT / "benchmarks" / "results" / "attention.csv", rows, provenance())
        plot(rows, path.with_suffix(".png"))
        console.print(f"wrote {path.relative_to(ROOT)} and its plot")
    return 0


if __name__ == "__main__":
    sys.exit(main())
