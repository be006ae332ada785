"""Prefill of prompts of different lengths: packed, one by one, and padded to the longest.

    python benchmarks/suites/bench_prepacking.py --save

Prepacking (arXiv 2404.09529) computes the prompts of a batch without padding. vLLM's scheduler does
so for every step, and `vllm-relay build` for all its prompts. Beside it, on the same engine: one
prompt after the other, and prompts padded to the longest, which is what a batch of equal length
computes.
"""

import argparse
import statistics
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import Engine, Limits, engines
from benchmarks.harness.environment import model_path
from benchmarks.harness.latin_square import save_engines
from benchmarks.harness.terminal import add_eager, add_save, at_least, make_console, step
from vllm_relay.serving.agreement import Answer, distance
from vllm_relay.serving.comparison import interleaved

WAYS = ("packed", "one by one", "padded")
VOCABULARY = 2048
# Logarithmic standard deviation of the lengths.
SPREAD = 0.8


def prompts_of(args: argparse.Namespace, number: int) -> list[list[int]]:
    """Prompts of a round; their lengths are those of every round."""
    lengths = args.median * np.exp(SPREAD * np.random.default_rng(0).standard_normal(args.prompts))
    rng = np.random.default_rng([number, 1])
    kept = np.clip(lengths, 1, args.longest).astype(int)
    return [rng.integers(3, VOCABULARY, length).tolist() for length in kept]


def prefill(engine: Engine, way: str, prompts: list[list[int]]) -> tuple[list[float], list[Answer]]:
    """Seconds until the first token of each prompt, in a way, and the answers."""
    engine.forget()
    if way == "one by one":
        each = [engine.finish([prompt], [1]) for prompt in prompts]
        answers = [answer for done in each for answer in done.answers]
        return list(accumulate(done.seconds for done in each)), answers
    if way == "padded":
        longest = max(map(len, prompts))
        prompts = [prompt + [3] * (longest - len(prompt)) for prompt in prompts]
    done = engine.finish(prompts, [1] * len(prompts))
    return done.ttft_s, done.answers


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model; SmolLM2-135M by default")
    parser.add_argument("--prompts", type=at_least(2), default=16)
    parser.add_argument("--median", type=at_least(1), default=400, help="tokens of a prompt")
    parser.add_argument("--longest", type=at_least(1), default=2048, help="tokens of a prompt")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="rounds")
    add_eager(parser)
    add_save(parser)
    args = parser.parse_args(argv)
    console = make_console()
    lengths = list(map(len, prompts_of(args, 0)))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    means: dict[str, list[float]] = {way: [] for way in WAYS}
    limits = Limits(max(lengths) + 2, args.prompts, eager=args.eager)
    with engines(args.model or model_path(), ("relay",), limits) as started:
        for number in range(args.repeats + 1):  # the first one warms up
            prompts = prompts_of(args, number)
            answers: dict[str, list[Answer]] = {}
            for way in interleaved(list(WAYS), number):
                with step(console, f"round {number}: {way}"):
                    ttft_s, answers[way] = prefill(started["relay"], way, prompts)
                if number:
                    seconds[way].append(max(ttft_s))
                    means[way].append(statistics.mean(ttft_s))
            apart = distance(answers["one by one"], answers["packed"])
            if not apart.agrees:
                console.print(f"answers differ, no time is reported: {apart}", style="red")
                return 1
    computed = {way: sum(lengths) for way in WAYS} | {"padded": len(lengths) * max(lengths)}
    at_once = computed | {"one by one": max(lengths)}
    rows: list[dict[str, Any]] = []
    table = Table("way", "tokens computed", "KV tokens at once", "seconds", "times padded", "TTFT")
    for way in WAYS:
        ratios = [a / b for a, b in zip(seconds["padded"], seconds[way], strict=True)]
        row = {
            "prompts": args.prompts,
            "longest_tokens": max(lengths),
            "way": way,
            "rounds": args.repeats,
            "tokens_computed": computed[way],
            "kv_tokens_at_once": at_once[way],
            "seconds": round(statistics.median(seconds[way]), 4),
            "times_as_fast_as_padded": round(statistics.median(ratios), 3),
            "times_min": round(min(ratios), 3),
            "times_max": round(max(ratios), 3),
            "ttft_mean_s": round(statistics.median(means[way]), 4),
            "logprob_rms": round(apart.rms, 5),
        }
        rows.append(row)
        shown = ("tokens_computed", "kv_tokens_at_once", "seconds", "times_as_fast_as_padded")
        table.add_row(way, *(f"{row[x]:,}" for x in shown), f"{row['ttft_mean_s']:.2f} s")
    console.print(table)
    if args.save:
        save_engines(console, "prepacking", rows, args.eager)
    return 0


if __name__ == "__main__":
    sys.exit(main())
