"""Non-interactive throughput by length of the system prompt: four interleaved systems.

    python benchmarks/suites/bench_throughput.py --save

The non-interactive and synthetic workloads of the RelayAttention paper (arXiv 2402.14808): all
requests arrive at once, with user and generation lengths of conversations or of a fixed mix.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import Limits
from benchmarks.harness.environment import model_path
from benchmarks.harness.latin_square import Comparison, Round, Workload, add_options, run
from vllm_relay.serving.systems import FOUR

# Log-normal, clipped: medians and spreads of published conversation datasets, shortened so that a
# CPU gets through them. (median, sigma, least, most)
USER, GENERATED = (40, 0.9, 4, 256), (60, 0.7, 8, 160)
LONGEST = USER[3] + GENERATED[3]


def lengths(rng: np.random.Generator, count: int, of: tuple[int, float, int, int]) -> list[int]:
    median, sigma, least, most = of
    drawn = median * np.exp(sigma * rng.standard_normal(count))
    return np.clip(drawn.round(), least, most).astype(int).tolist()


def make_workload(
    prefix: list[int], mix: tuple[int, int] | None, requests: int, vocabulary: int
) -> Workload:
    """Requests under one prefix, with lengths of conversations or of a fixed mix."""

    def make_round(number: int) -> Round:
        rng = np.random.default_rng(number)
        if mix is None:
            # the same lengths in every round: rounds are repetitions
            of_case = np.random.default_rng(0)
            users = lengths(of_case, requests, USER)
            generated = lengths(of_case, requests, GENERATED)
        else:
            users, generated = [mix[0]] * requests, [mix[1]] * requests
        return [prefix + rng.integers(3, vocabulary, n).tolist() for n in users], generated

    name = "conversations" if mix is None else f"({mix[0]}, {mix[1]})"
    return Workload(
        {"prefix_tokens": len(prefix), "lengths": name, "requests": requests}, make_round
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model; SmolLM2-135M by default")
    parser.add_argument("--prefix", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument(
        "--mix",
        type=int,
        nargs=2,
        action="append",
        default=[],
        metavar=("USER", "GENERATED"),
        help="also this fixed mix, with every prefix",
    )
    parser.add_argument("--requests", type=int, default=32)
    add_options(parser, repeats=3, keys=FOUR)
    args = parser.parse_args(argv)
    model = args.model or model_path()
    vocabulary = 2048  # of the tokens that prompts are made of, which every model has
    rng = np.random.default_rng(7)
    prefixes = [rng.integers(3, vocabulary, n).tolist() for n in args.prefix]
    mixes: list[Any] = [None, *map(tuple, args.mix)]
    cases = [make_workload(p, m, args.requests, vocabulary) for p in prefixes for m in mixes]
    longest = max([LONGEST, *(sum(mix) for mix in args.mix)])
    limits = Limits(max(args.prefix) + longest + 1, args.requests, eager=args.eager)
    title = f"{args.requests} requests at once"
    columns = ("prefix_tokens", "lengths")
    comparison = Comparison("throughput", title, columns, FOUR, limits, cases, prefixes)
    return run(comparison, model, args)


if __name__ == "__main__":
    sys.exit(main())
