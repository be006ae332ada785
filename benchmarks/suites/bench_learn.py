"""Tenants of shifting popularity, with `system_kv.learn` and without: cached tokens and TTFT.

    python benchmarks/suites/bench_learn.py --save

Tenants with a prefix each, popular by Zipf's law, send one request after another to an engine whose
KV cache holds some of the prefixes. After some requests popularity is dealt anew. Two engines get
each request in turns; their answers are compared. Every round has other tenants and begins with an
empty prefix cache.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import KV_BLOCK, Engine, Finished, Limits, close
from benchmarks.harness.environment import engine_environment
from benchmarks.harness.latin_square import save_engines
from benchmarks.harness.random_model import VOCABULARY, write_random_model
from benchmarks.harness.terminal import add_eager, add_save, at_least, make_console, step
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving.agreement import Distance, distance
from vllm_relay.serving.comparison import interleaved
from vllm_relay.serving.systems import SYSTEMS

# Way -> settings of relay.
WAYS: dict[str, dict[str, Any]] = {"lru": {}, "learn": {"system_kv": {"learn": True}}}
HEADS = (8, 2, 64)


def trace(args: argparse.Namespace, shift_every: int, seed: int) -> Iterator[list[int]]:
    """Prompts in the order of their arrival; ``shift_every`` requests: 0 is never."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(3, VOCABULARY, (args.tenants, args.prefix)).tolist()
    popularity = 1 / np.arange(1, args.tenants + 1)
    order = rng.permutation(args.tenants)
    for number in range(args.requests):
        if shift_every and number and number % shift_every == 0:
            order = rng.permutation(args.tenants)
        tenant = order[rng.choice(args.tenants, p=popularity / popularity.sum())]
        yield prefixes[tenant] + rng.integers(3, VOCABULARY, args.own).tolist()


@contextmanager
def two_engines(limits: Limits) -> Iterator[dict[str, Engine]]:
    """An engine for each of `WAYS`, with the same random model."""
    with ExitStack() as stack:
        stack.enter_context(ended_in_order())
        stack.enter_context(engine_environment())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_random_model(folder / "model", *HEADS)
        started: dict[str, Engine] = {}
        stack.callback(close, started)
        for way, settings in WAYS.items():
            started[way] = Engine(model, SYSTEMS["relay"], limits, settings)
        yield started


def apart(finished: dict[str, list[Finished]]) -> Distance:
    """Distance of the answers with ``learn`` from those without."""
    answers = {
        way: [answer for one in done for answer in one.answers] for way, done in finished.items()
    }
    return distance(answers["learn"], answers["lru"])


def row_of(done: list[Finished]) -> dict[str, Any]:
    """CSV columns of one way in one round."""
    ttft_s = [one.prefill_seconds for one in done]
    return {
        "cached_tokens": sum(one.cached for one in done),
        "ttft_p50_s": round(statistics.median(ttft_s), 5),
        "ttft_mean_s": round(statistics.mean(ttft_s), 5),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tenants", type=at_least(1), default=40)
    parser.add_argument("--prefix", type=at_least(KV_BLOCK), default=512, help="tokens")
    parser.add_argument("--own", type=at_least(1), default=270, help="tokens of a request's own")
    parser.add_argument("--generate", type=at_least(1), default=2, help="tokens")
    parser.add_argument("--requests", type=at_least(1), default=500, help="of a round")
    parser.add_argument(
        "--shift-every", type=at_least(0), nargs="+", default=[0, 200], help="requests; 0: never"
    )
    parser.add_argument("--kv-blocks", type=at_least(8), default=64, help="of the KV cache")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="rounds")
    add_eager(parser)
    add_save(parser)
    args = parser.parse_args(argv)
    console = make_console()
    names = ("tenants", "prefix", "own", "generate", "requests", "kv_blocks")
    shape = {name: getattr(args, name) for name in names}
    rows: list[dict[str, Any]] = []
    table = Table("shift every", "round", "way", "cached tokens", "TTFT p50, ms")
    limits = Limits(args.prefix + args.own + args.generate + 1, 4, args.kv_blocks, args.eager)
    with two_engines(limits) as started:
        for shift_every in args.shift_every:
            for number in range(args.repeats):
                finished: dict[str, list[Finished]] = {way: [] for way in WAYS}
                with step(console, f"shift every {shift_every}, round {number}") as report:
                    for engine in started.values():
                        engine.forget()
                    for i, prompt in enumerate(trace(args, shift_every, seed=number)):
                        for way in interleaved(list(WAYS), i):
                            finished[way].append(started[way].finish([prompt], [args.generate]))
                        report(f"request {i + 1} of {args.requests}")
                found = apart(finished)
                if not found.agrees:
                    console.print(f"answers differ, no speed is reported: {found}", style="red")
                    return 1
                for way, done in finished.items():
                    row = {**shape, "shift_every": shift_every, "round": number, "way": way}
                    row |= row_of(done) | {"logprob_rms": round(found.rms, 5)}
                    rows.append(row)
                    cells = (shift_every, number, way, row["cached_tokens"])
                    table.add_row(*map(str, cells), f"{1000 * row['ttft_p50_s']:.1f}")
    console.print(table)
    if args.save:
        save_engines(console, "learn", rows, args.eager)
    return 0


if __name__ == "__main__":
    sys.exit(main())
