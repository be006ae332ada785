"""Speed-up of decode attention: as `vllm-relay explain` predicts it, and as engines show it.

    python benchmarks/suites/bench_prediction.py --save

Random models with several head shapes decode under one prefix or several. The models have as many
layers as small models of today and are narrow, so that attention is most of a step. A step's
attention, planning included, is what the step takes longer than that of an engine that skips
attention. `explain` replays the same requests as a log, planning not included, with costs that
`vllm-relay calibrate` measures before the engines start, in a file that only this run has. Engines
and `explain` have answers that are long enough to pack what requests share.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import Limits, engines
from benchmarks.harness.environment import engine_environment, model_dtype
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
from benchmarks.harness.terminal import at_least, make_console, step
from benchmarks.harness.traces import explain
from vllm_relay.serving.agreement import WrongAnswers
from vllm_relay.serving.processes import beside_python

KEYS = ("stock", "relay", "no-attention")
SHAPES = ((16, 16, 128), (16, 4, 128), (9, 3, 64))
# A multiple of every number of heads.
LAYERS, WIDTH = 16, 576
# requests, prefixes, tokens of each, a request's own tokens
CASES = (
    (4, 1, 2048, 64), (8, 1, 4096, 64), (8, 1, 1024, 256), (16, 2, 2048, 256),
    (32, 1, 512, 64), (32, 1, 2048, 64), (32, 1, 4096, 64), (32, 4, 1024, 64),
)  # fmt: skip


def make_workload(requests: int, prefixes: int, shared: int, own: int, steps: int) -> Workload:
    """Requests that alternate between the prefixes, the same in every round."""
    rng = np.random.default_rng(shared + prefixes)
    heads = [rng.integers(3, VOCABULARY, shared).tolist() for _ in range(prefixes)]
    prompts = [
        heads[i % prefixes] + rng.integers(3, VOCABULARY, own).tolist() for i in range(requests)
    ]

    def make_round(number: int) -> Round:
        return prompts, [steps] * requests

    names = ("requests", "prefixes", "shared_tokens", "own_tokens")
    return Workload(dict(zip(names, (requests, prefixes, shared, own), strict=True)), make_round)


@contextmanager
def measured_costs(heads: tuple[int, int, int]) -> Iterator[None]:
    """Costs of this shape, measured now: `explain` and the engines of the body read no others."""
    with tempfile.TemporaryDirectory() as folder, engine_environment():
        os.environ["VLLM_RELAY_DEVICES"] = str(Path(folder) / "devices.json")
        command = beside_python("vllm-relay", "calibrate", "--shape", "/".join(map(str, heads)))
        command += ["--dtype", model_dtype()]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        yield


def predict(workload: Workload, heads: tuple[int, int, int]) -> tuple[float, str]:
    """Speed-up that `vllm-relay explain` tells of a log of these requests; source of its costs."""
    prompts, lengths = workload.make_round(0)
    lines = [
        json.dumps({"prompt_token_ids": list(prompt), "output_length": length})
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as log:
        log.write("\n".join(lines))
        log.flush()
        names = ("--heads", "--kv-heads", "--head-size")
        shape = [x for pair in zip(names, heads, strict=True) for x in pair]
        data = explain(Path(log.name), "--concurrency", len(prompts), *shape)
    source, _, _ = data["costs"]["source"].partition(" (")  # the file is gone soon
    return data["predicted_speedup"], source


def row_of(measured: Measured, workload: Workload, heads: tuple[int, int, int]) -> Row:
    requests, rates = workload.columns["requests"], measured.decode_tok_s
    stock, relay, none = ([1e3 * requests / rate for rate in rates[key]] for key in KEYS)
    bare = statistics.median(none)
    if min(stock + relay) <= max(none):
        raise WrongAnswers(f"{workload.title}: attention is lost in the spread of the steps")
    counted = measured.counted["relay"]
    speedups = [(s - bare) / (r - bare) for s, r in zip(stock, relay, strict=True)]
    found, (predicted, source) = statistics.median(speedups), predict(workload, heads)
    return {
        **dict(zip(("query_heads", "kv_heads", "head_size"), heads, strict=True)),
        "layers": LAYERS,
        **workload.columns,
        "rounds": len(stock),
        "stock_step_ms": round(statistics.median(stock), 3),
        "relay_step_ms": round(statistics.median(relay), 3),
        "no_attention_step_ms": round(bare, 3),
        "planning_ms": round(1e3 * counted["planning_seconds"] / counted["steps"], 3),
        "attention_speedup": round(found, 4),
        "attention_speedup_min": round(min(speedups), 4),
        "attention_speedup_max": round(max(speedups), 4),
        "predicted_speedup": round(predicted, 4),
        "error": round(predicted / found - 1, 4),
        "costs": source,
        "steps_relayed": counted["steps_relayed"],
        "logprob_rms": round(measured.distances["relay"].rms, 5),
    }


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title="Speed-up of decode attention")
    columns = ("heads", "requests", "prefixes", "shared", "own", "measured", "predicted", "error")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['query_heads']}/{row['kv_heads']}",
            *(str(row[x]) for x in ("requests", "prefixes", "shared_tokens", "own_tokens")),
            *(f"{row[x]:.2f}" for x in ("attention_speedup", "predicted_speedup")),
            f"{row['error']:+.0%}",
        )
    console.print(table)
    errors = [abs(row["error"]) for row in rows]
    console.print(f"median error of {len(rows)} workloads: {statistics.median(errors):.1%}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, repeats=5)
    parser.add_argument(
        "--cases", type=at_least(1), default=len(CASES), help="of each head shape, the first ones"
    )
    parser.add_argument("--shapes", type=at_least(1), default=len(SHAPES), help="the first ones")
    parser.add_argument("--steps", type=at_least(3), default=48, help="tokens of each request")
    args = parser.parse_args(argv)
    console, rows = make_console(), []
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB: the largest case, in float32, too
    cases = CASES[: args.cases]
    longest = max(shared + own for _, _, shared, own in cases) + args.steps
    limits = Limits(longest, max(requests for requests, *_ in cases), eager=args.eager)
    for heads in SHAPES[: args.shapes]:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            model = write_random_model(Path(folder), *heads, layers=LAYERS, width=WIDTH)
            with step(console, "/".join(map(str, heads))) as report:
                report("measuring its costs")
                stack.enter_context(measured_costs(heads))
                started = stack.enter_context(engines(model, KEYS, limits, report=report))
            for workload in (make_workload(*case, args.steps) for case in cases):
                try:
                    measured = checked(started, workload, args, console)
                    rows.append(row := row_of(measured, workload, heads))
                except WrongAnswers as error:
                    console.print(str(error), style="red", markup=False, soft_wrap=True)
                    return 1
                console.print(
                    f"  attention {row['attention_speedup']:.2f} times as fast, predicted "
                    f"{row['predicted_speedup']:.2f}"
                )
    show(console, rows)
    if args.save:
        save_engines(console, "prediction", rows, args.eager)
    return 0


if __name__ == "__main__":
    sys.exit(main())
