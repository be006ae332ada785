"""One level of sharing against two: examples for all, problems for some, samples of each.

    python benchmarks/suites/bench_tree.py --save

Few-shot examples are shared by every request, each problem by its samples (Hydragen's hierarchical
sharing, arXiv 2402.05099, appendix C): one level shares either, two levels share both.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import Limits
from benchmarks.harness.latin_square import Comparison, Round, Workload, add_options, run
from benchmarks.harness.random_model import VOCABULARY, write_random_model
from benchmarks.harness.terminal import add_heads

KEYS = ("stock", "relay-1-level", "relay-2-levels", "no-attention")


def make_workload(args: argparse.Namespace, problem_tokens: int) -> Workload:
    rng = np.random.default_rng(problem_tokens)
    examples = rng.integers(3, VOCABULARY, args.examples).tolist()
    problems = [
        examples + rng.integers(3, VOCABULARY, problem_tokens).tolist()
        for _ in range(args.problems)
    ]

    def make_round(number: int) -> Round:
        own = np.random.default_rng(1000 + number)
        prompts = [
            problem + own.integers(3, VOCABULARY, args.own).tolist()
            for problem in problems
            for _ in range(args.samples)
        ]
        return prompts, [args.steps] * len(prompts)

    columns = {
        "examples_tokens": args.examples,
        "problem_tokens": problem_tokens,
        "problems": args.problems,
        "samples": args.samples,
    }
    return Workload(columns, make_round)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=2048, help="tokens that all share")
    parser.add_argument(
        "--problem", type=int, nargs="+", default=[0, 512, 2048], help="tokens of each problem"
    )
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="of each problem")
    parser.add_argument("--own", type=int, default=16, help="tokens that each sample adds")
    parser.add_argument("--steps", type=int, default=24, help="tokens each sample produces")
    add_heads(parser)
    add_options(parser, repeats=5, keys=KEYS)
    args = parser.parse_args(argv)
    limits = Limits(
        args.examples + max(args.problem) + args.own + args.steps,
        args.problems * args.samples,
        eager=args.eager,
    )
    cases = [make_workload(args, tokens) for tokens in args.problem]
    title = f"{args.examples:,} tokens of examples for all"
    comparison = Comparison("tree", title, ("problem_tokens",), KEYS, limits, cases)
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), *args.heads)
        return run(comparison, model, args)


if __name__ == "__main__":
    sys.exit(main())
