"""Interactive serving: latency against the rate of requests, four real servers in one run.

    python benchmarks/bench_serving.py --save

After the RelayAttention paper's (arXiv 2402.14808) interactive workload: chats under one long
system prompt, Poisson arrivals, `vllm bench serve` as the client; first everything at once, then
rate by rate. All servers are up, one is at work at a time, and each gets the same prompts.
"""

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.chat import licence_prompt, questions
from benchmarks.common import ROOT, model_path, provenance, step, write_csv
from benchmarks.engines import make_console
from vllm_relay.bench import serving
from vllm_relay.bench.processes import build_system_kv
from vllm_relay.bench.systems import FOUR, SYSTEMS
from vllm_relay.cli.bench import summary

ENV = {"VLLM_CPU_KVCACHE_SPACE": "2"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model; SmolLM2-135M by default")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of the system prompt")
    parser.add_argument("--requests", type=int, default=32, help="of each measurement")
    parser.add_argument("--tokens", type=int, default=48, help="that each request gets")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0], help="requests per second"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(FOUR))
    parser.add_argument(
        "--bound", type=float, default=0.1, help="seconds per token, for the sustained rate"
    )
    parser.add_argument("--save", action="store_true", help="write a CSV to benchmarks/results")
    args = parser.parse_args(argv)
    console = make_console()
    model = args.model or model_path()
    system = licence_prompt(Tokenizer.from_file(str(model / "tokenizer.json")), args.prompt_tokens)
    flags = ["--enforce-eager", "--max-model-len", str(args.prompt_tokens + 1024)]
    flags += ["--max-num-seqs", str(args.requests), "--disable-uvicorn-access-log"]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    # (round, number) in the question: what all share is the system prompt.
    topics = questions(min(args.requests, 96))

    def load(rate: float) -> Any:
        def make(number: int) -> serving.Load:
            asked = [
                f"{topics[i % len(topics)]} ({number}, {rate:g}, {i})" for i in range(args.requests)
            ]
            return serving.Load(rate, serving.render(tokenizer, system, asked), args.tokens)

        return make

    loads = [load(rate) for rate in (serving.EVERYTHING_AT_ONCE, *args.rates)]
    with tempfile.TemporaryDirectory() as name, step(console, "serving") as report:
        folder = Path(name)
        files = []
        if any(SYSTEMS[key].system_kv for key in args.systems):
            text = folder / "prompt.txt"
            text.write_text(system)
            files = [build_system_kv(model, text, flags, env=ENV, report=report)]
        try:
            rows = serving.compare(
                model, args.systems, flags, loads, args.repeats, folder,
                files=files, env=ENV, report=report,
            )  # fmt: skip
        except serving.WrongAnswers as error:
            console.print(f"[red]{error}[/]")
            return 1
    rows = [{"model": model.name, "prompt_tokens": args.prompt_tokens, **row} for row in rows]
    show(console, rows, args.bound)
    if args.save:
        path = write_csv(ROOT / "benchmarks" / "results" / "serving.csv", rows, provenance())
        console.print(f"wrote {path.relative_to(ROOT)}")
    return 0


def show(console: Console, rows: list[dict[str, Any]], bound: float) -> None:
    table = Table(title=f"A system prompt of {rows[0]['prompt_tokens']:,} tokens (medians)")
    for heading in ("requests/s", "system", "tokens/s", "TTFT", "TPOT", "s/token", "times vLLM"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for gain in summary(rows, bound):
        table.add_row(
            "all at once" if math.isinf(gain["rate"]) else f"{gain['rate']:g}",
            SYSTEMS[gain["system"]].label,
            f"{gain['tokens_per_s']:,.0f}",
            f"{gain['ttft_p50_s']:.3f} s",
            f"{1e3 * gain['tpot_p50_s']:.1f} ms",
            f"{gain['normalized_s']:.4f}",
            f"{gain['times_latency']:.2f}",
        )
    console.print(table)
    for key in dict.fromkeys(row["system"] for row in rows):
        rate = serving.sustained(rows, key, bound)
        held = "none" if rate is None else f"{rate:g} requests/s"
        console.print(f"sustained within {bound:g} s per token: {SYSTEMS[key].label}: {held}")
    worst = statistics.fmean(row["logprob_rms"] for row in rows)
    console.print(f"answers agree within {worst:.4f} nats (rms)")


if __name__ == "__main__":
    sys.exit(main())
