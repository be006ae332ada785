"""An offline batch in random order and in that of `vllm_relay.order`, with a small KV cache.

    python benchmarks/suites/bench_order.py --save

Tenants with a prefix each have as many requests; the KV cache holds some tenants' prefixes beside
what the running requests have of their own. Both orders on vLLM and on relay, in turns, from an
empty prefix cache; the answers to each prompt are compared with those of vLLM in random order.
"""

import argparse
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import vllm_relay
from benchmarks.harness.engines import KV_BLOCK, Limits, engines
from benchmarks.harness.latin_square import save_engines
from benchmarks.harness.random_model import VOCABULARY, write_random_model
from benchmarks.harness.terminal import add_eager, add_save, at_least, make_console, step
from vllm_relay.serving.agreement import Answer, distance
from vllm_relay.serving.comparison import interleaved
from vllm_relay.serving.systems import SYSTEMS

ORDERS = ("random", "ordered")
HEADS = (8, 2, 64)
# (system, order)
Way = tuple[str, str]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tenants", type=at_least(1), default=64)
    parser.add_argument("--each", type=at_least(1), default=16, help="requests of a tenant")
    parser.add_argument("--prefix", type=at_least(KV_BLOCK), default=512, help="tokens")
    parser.add_argument("--own", type=at_least(1), default=48, help="tokens of a request's own")
    parser.add_argument("--generate", type=at_least(1), default=32, help="tokens")
    parser.add_argument("--held", type=at_least(1), default=8, help="prefixes in the KV cache")
    parser.add_argument("--at-once", type=at_least(1), default=32, help="running requests")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    add_eager(parser)
    add_save(parser)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    prefixes = rng.integers(3, VOCABULARY, (args.tenants, args.prefix)).tolist()
    prompts = [
        prefix + rng.integers(3, VOCABULARY, args.own).tolist()
        for prefix in prefixes
        for _ in range(args.each)
    ]
    prompts = [prompts[i] for i in rng.permutation(len(prompts))]
    order_of = {"random": list(range(len(prompts))), "ordered": vllm_relay.order(prompts)}
    longest = args.prefix + args.own + args.generate
    # One block of every pool is vLLM's null block.
    held = args.held * (args.prefix // KV_BLOCK)
    own = -(-longest // KV_BLOCK) - args.prefix // KV_BLOCK
    blocks = 1 + held + args.at_once * own
    limits = Limits(longest + 1, args.at_once, blocks, args.eager)

    console = make_console()
    ways: list[Way] = list(product(("stock", "relay"), ORDERS))
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    cached: dict[Way, int] = {}
    answers: dict[Way, list[Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), *HEADS)
        with engines(model, ("stock", "relay"), limits) as started:
            for number in range(args.repeats + 1):
                for way in interleaved(ways, number):
                    system, order = way
                    at, engine = order_of[order], started[system]
                    if not number:  # to warm up
                        at = at[: args.at_once]
                    with step(console, f"round {number}: {SYSTEMS[system].label}, {order}"):
                        engine.forget()
                        done = engine.finish([prompts[i] for i in at], [args.generate] * len(at))
                    if number:
                        seconds[way].append(done.seconds)
                        cached[way] = done.cached
                        by_prompt = sorted(zip(at, done.answers, strict=True), key=lambda x: x[0])
                        answers[way] = [answer for _, answer in by_prompt]
    apart = {way: distance(answers[way], answers["stock", "random"]) for way in ways}
    if wrong := [f"{way}: {found}" for way, found in apart.items() if not found.agrees]:
        console.print(f"answers differ, no speed is reported: {wrong}", style="red", markup=False)
        return 1

    rows: list[dict[str, Any]] = []
    table = Table("system", "order", "seconds", "speed-up", "tokens cached", "logprob rms")
    for way in ways:
        system, order = way
        ratios = [a / b for a, b in zip(seconds[system, "random"], seconds[way], strict=True)]
        row = {
            **{name: getattr(args, name) for name in ("tenants", "each", "prefix", "own")},
            **{name: getattr(args, name) for name in ("generate", "held", "at_once")},
            "kv_blocks": blocks,
            "system": system,
            "order": order,
            "rounds": len(ratios),
            "seconds": round(statistics.median(seconds[way]), 3),
            "times_random": round(statistics.median(ratios), 3),
            "times_min": round(min(ratios), 3),
            "times_max": round(max(ratios), 3),
            "prompt_tokens": sum(map(len, prompts)),
            "cached_tokens": cached[way],
            "logprob_rms": round(apart[way].rms, 5),
        }
        rows.append(row)
        shown = (row[name] for name in ("seconds", "times_random", "cached_tokens", "logprob_rms"))
        table.add_row(SYSTEMS[system].label, order, *map(str, shown))
    console.print(table)
    if args.save:
        save_engines(console, "order", rows, args.eager)
    return 0


if __name__ == "__main__":
    sys.exit(main())
