"""Planning time: per step of a real engine, and of the planner alone as batches grow.

    python benchmarks/suites/bench_planning.py --save

First the planner alone, on block tables of growing size. Then an engine decodes ``--requests``
requests under a tree of prefixes, with the plan of every step and the step itself timed: once with
groups kept between steps, once with groups chosen anew, as if every step changed the batch.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import OFFLINE, importable
from benchmarks.harness.random_model import VOCABULARY, write_random_model
from benchmarks.harness.result_csv import save
from benchmarks.harness.terminal import add_heads, add_save
from benchmarks.suites.planning_worker import costs_that_pay
from vllm_relay.sharing import Planner, make_plan

# (requests, KV blocks) of the planner alone; two prompts share half of the blocks.
SIZES = [(64, 64), (256, 64), (1024, 64), (256, 256), (256, 512), (1024, 512)]
DOCUMENTS = 8
BLOCK = 16


def tree(rows: int, columns: int) -> np.ndarray:
    """Block tables below two prompts with `DOCUMENTS` documents each, own blocks at the end."""
    ids = iter(range(1, 1 << 30))
    half, own = columns // 2, max(1, columns // 16)

    def take(count: int) -> list[int]:
        return [next(ids) for _ in range(count)]

    prompts = [take(half) for _ in range(2)]
    documents = [prompts[d % 2] + take(columns - half - own) for d in range(2 * DOCUMENTS)]
    order = np.random.default_rng(0).integers(2 * DOCUMENTS, size=rows)
    return np.array([documents[d] + take(own) for d in order], dtype=np.int32)


def time_planner(rows: int, columns: int, repeats: int = 9) -> dict[str, Any]:
    """Milliseconds to plan a new batch, and one whose blocks are those of the last step."""
    table = tree(rows, columns)
    lens = np.full(rows, columns * BLOCK, dtype=np.int32)
    queries, starts = np.ones(rows, dtype=np.int32), np.arange(rows + 1, dtype=np.int32)
    new, kept = [], []
    for _ in range(repeats):
        planner = Planner(BLOCK, costs_that_pay(), 3)
        for times in (new, kept):
            begun = time.perf_counter()
            choice = planner.plan(table, lens, queries)
            make_plan(choice.forest, table, lens, starts)
            times.append(time.perf_counter() - begun)
    return {
        "part": "planner",
        "requests": rows,
        "blocks": columns,
        "new_ms": round(1e3 * statistics.median(new), 4),
        "kept_ms": round(1e3 * statistics.median(kept), 4),
        "ns_per_block": round(1e9 * statistics.median(new) / (rows * columns), 2),
    }


def prompts(requests: int, shared: int) -> tuple[list[list[int]], list[list[int]]]:
    """Requests below two prompts of half of the shared tokens and documents of the other half."""
    rng = np.random.default_rng(1)

    def take(count: int) -> list[int]:
        return rng.integers(3, VOCABULARY, count).tolist()

    systems = [take(shared // 2) for _ in range(2)]
    documents = [systems[d % 2] + take(shared - shared // 2) for d in range(4)]
    return documents, [documents[i % 4] + take(8) for i in range(requests)]


def time_engine(llm: Any, requests: int, shared: int, steps: int) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    def run(batch: list[list[int]], tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in batch]
        llm.generate(given, params, use_tqdm=False)  # type: ignore[arg-type]

    documents, batch = prompts(requests, shared)
    run(documents, 1)
    rows = []
    for keep in (True, False):
        llm.collective_rpc("time_plans", args=(keep,))
        run(batch, steps)
        plans, taken = llm.collective_rpc("timed_plans")[0]
        full = [i for i, (count, _, relayed) in enumerate(plans) if count == requests and relayed]
        # The first ones make copies.
        plan_s = [plans[i][1] for i in full[2:]]
        step_s = [taken[i] for i in full[2:]]
        rows.append(
            {
                "part": "engine",
                "requests": requests,
                "shared_tokens": shared,
                "groups": "kept" if keep else "chosen anew in every step",
                "steps": len(plan_s),
                "plan_ms": round(1e3 * statistics.median(plan_s), 4),
                "plan_mean_ms": round(1e3 * statistics.mean(plan_s), 4),
                "step_ms": round(1e3 * statistics.median(step_s), 2),
                "share": round(sum(plan_s) / sum(step_s), 5),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--shared", type=int, default=8192, help="tokens that requests share")
    parser.add_argument("--steps", type=int, default=24)
    add_heads(parser)
    add_save(parser)
    args = parser.parse_args()
    console = Console()
    os.environ.update(OFFLINE | importable())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "6")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    rows = [time_planner(*size) for size in SIZES]
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), *args.heads)
        llm = LLM(
            str(model),
            attention_backend="relay",
            additional_config={"relay": {"max_copy_gib": 4}},
            worker_extension_cls="benchmarks.suites.planning_worker.PlanningWorker",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=args.shared + 8 + args.steps,
            max_num_seqs=args.requests,
        )
        rows += time_engine(llm, args.requests, args.shared, args.steps)
    table = Table(title="Planning by itself")
    for name in ("requests", "blocks", "new batch, ms", "kept, ms", "ns per block"):
        table.add_column(name, justify="right")
    for row in rows[:-2]:
        table.add_row(*(f"{row[k]:,}" for k in list(row)[1:]))
    console.print(table)
    for row in rows[-2:]:
        console.print(
            f"{row['requests']} requests, {row['shared_tokens']:,} shared tokens, groups "
            f"{row['groups']}: a plan takes {row['plan_ms']:.2f} ms (mean "
            f"{row['plan_mean_ms']:.2f}) of a step's {row['step_ms']:,.0f} ms: {row['share']:.2%}",
            highlight=False,
        )
    if args.save:
        save(console, "planning", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
