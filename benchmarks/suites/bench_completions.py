"""Completions of one prompt: ``n`` samples each, with temperature, by three interleaved systems.

    python benchmarks/suites/bench_completions.py --save

Hydragen's parallel sampling (arXiv 2402.05099, GSM8K with many samples of each problem) and the
rollouts of GRPO. First a batch of equal size: the more samples, the fewer prompts. Then all samples
of ``--prompts`` prompts at once in a KV cache of ``--kv-tokens``, of which each system runs as many
at a time as fit.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import KV_BLOCK, Limits
from benchmarks.harness.environment import model_path
from benchmarks.harness.latin_square import Comparison, Round, Workload, add_options, run
from vllm_relay.serving.systems import FOUR

# Prompts change with every round, so no file can hold their KV.
KEYS = tuple(key for key in FOUR if key != "relay-system-kv")
# Of the tokens that prompts are made of, which every model has.
VOCABULARY = 2048
# Samples of a prompt from which on relay has to relay steps.
SHARED_BY = 8


def make_workload(batch: str, prompts: int, samples: int, args: argparse.Namespace) -> Workload:
    """Each of some prompts, which have nothing in common, ``samples`` times."""

    def make_round(number: int) -> Round:
        rng = np.random.default_rng([number, prompts, samples])
        given = [rng.integers(3, VOCABULARY, args.prompt_tokens).tolist() for _ in range(prompts)]
        asked = [prompt for prompt in given for _ in range(samples)]
        return asked, [args.tokens] * len(asked)

    columns = {
        "batch": batch,
        "samples": samples,
        "prompts": prompts,
        "prompt_tokens": args.prompt_tokens,
        "temperature": args.temperature,
    }
    return Workload(columns, make_round, relays=samples >= SHARED_BY, temperature=args.temperature)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model; SmolLM2-135M by default")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 8, 16, 40])
    parser.add_argument("--batch", type=int, default=40, help="requests of the equal batch")
    parser.add_argument("--prompts", type=int, default=4, help="of the largest batch")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=48, help="of each sample")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--kv-tokens", type=int, default=65536, help="of the KV cache")
    add_options(parser, repeats=3, keys=KEYS)
    args = parser.parse_args(argv)
    equal = [
        make_workload("equal", max(1, args.batch // samples), samples, args)
        for samples in args.samples
    ]
    largest = [make_workload("largest", args.prompts, max(args.samples), args)]
    limits = Limits(
        args.prompt_tokens + args.tokens + 1,
        max(args.batch, args.prompts * max(args.samples)),
        kv_blocks=args.kv_tokens // KV_BLOCK,
        eager=args.eager,
    )
    title = f"completions of {args.prompt_tokens:,} tokens"
    columns = ("batch", "samples", "prompts")
    comparison = Comparison("completions", title, columns, KEYS, limits, [*equal, *largest])
    return run(comparison, args.model or model_path(), args)


if __name__ == "__main__":
    sys.exit(main())
