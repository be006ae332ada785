"""Few-shot questions on many subjects: time for all of them by number of examples.

    python benchmarks/suites/bench_fewshot.py --save

The RelayAttention paper's (arXiv 2402.14808) table 3 in shape: the questions on a subject share its
examples, and the letter that an answer begins with is scored. Questions are made up here; nothing
is downloaded. Prefix caches are emptied before each round, so that the KV of the examples is
computed once per round.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import KV_BLOCK, Limits
from benchmarks.harness.environment import model_path
from benchmarks.harness.latin_square import Comparison, Round, Workload, add_options, run
from vllm_relay.serving.agreement import Answer
from vllm_relay.serving.systems import FOUR

THINGS = (
    *("apples", "bricks", "candles", "drums", "eggs", "ferries", "gloves", "hats", "inkpots"),
    *("jars", "kites", "lamps", "maps", "nails", "oars", "pens", "quilts", "ropes", "stamps"),
)
PLACES = ("market", "harbour", "library")


def question(subject: int, number: int) -> tuple[str, str]:
    """A question of a subject, with four choices, and the letter of the right one."""
    rng = np.random.default_rng([subject, number])
    thing, place = THINGS[subject % len(THINGS)], PLACES[subject // len(THINGS) % len(PLACES)]
    had, more = rng.integers(2, 60, 2).tolist()
    right = int(rng.integers(4))
    choices = [had + more + 3 * (i - right) for i in range(4)]
    text = (
        f"Question: A trader at the {place} had {had} {thing} in the morning and bought {more} "
        f"more before noon. How many {thing} does the trader have now, if none was sold?\n"
    )
    text += "".join(f"({letter}) {x}\n" for letter, x in zip("ABCD", choices, strict=True))
    return text + "Answer: (", "ABCD"[right]


def shared_text(subject: int, examples: int) -> str:
    """Prefix of all questions of a subject; more examples extend it."""
    thing, place = THINGS[subject % len(THINGS)], PLACES[subject // len(THINGS) % len(PLACES)]
    text = f"The following are multiple choice questions about {thing} at the {place}.\n\n"
    for number in range(examples):
        asked, letter = question(subject, 10_000 + number)
        text += f"{asked}{letter})\n\n"
    return text


def make_workload(tokenizer: Tokenizer, examples: int, args: argparse.Namespace) -> Workload:
    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def asked(number: int) -> list[tuple[int, str, str]]:
        """Subject, question and right letter of a round's prompts."""
        return [
            (subject, *question(subject, args.questions * number + i))
            for subject in range(args.subjects)
            for i in range(args.questions)
        ]

    def make_round(number: int) -> Round:
        prompts = [
            tokens(shared_text(subject, examples)) + tokens(text)
            for subject, text, _ in asked(number)
        ]
        return prompts, [args.steps] * len(prompts)

    def right(number: int, answers: list[Answer]) -> int:
        texts = [tokenizer.decode([token for token, *_ in answer]) for answer in answers]
        letters = [letter for *_, letter in asked(number)]
        return sum(text.startswith(x) for text, x in zip(texts, letters, strict=True))

    shared = [len(tokens(shared_text(subject, examples))) for subject in range(args.subjects)]
    columns = {
        "examples": examples,
        "shared_tokens": round(sum(shared) / len(shared)),
        "subjects": args.subjects,
        "questions": args.questions,
    }
    relays = args.questions > 1 and min(shared) >= KV_BLOCK
    return Workload(columns, make_round, forget=True, right=right, relays=relays)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model; SmolLM2-135M by default")
    parser.add_argument("--examples", type=int, nargs="+", default=[0, 5, 21])
    parser.add_argument("--subjects", type=int, default=8)
    parser.add_argument("--questions", type=int, default=32, help="per subject and round")
    parser.add_argument("--steps", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--at-once", type=int, default=32, help="requests in a step, at most")
    add_options(parser, repeats=3, keys=FOUR)
    args = parser.parse_args(argv)
    model = args.model or model_path()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    most = max(args.examples)
    # Fewer examples are the beginning of more: their KV is in the same files.
    prefixes = [
        tokenizer.encode(shared_text(subject, most), add_special_tokens=False).ids
        for subject in range(args.subjects)
    ]
    limits = Limits(max(map(len, prefixes)) + 256, args.at_once, eager=args.eager)
    cases = [make_workload(tokenizer, examples, args) for examples in args.examples]
    title, columns = f"{args.subjects} subjects", ("examples", "shared_tokens", "right")
    comparison = Comparison("fewshot", title, columns, FOUR, limits, cases, prefixes)
    return run(comparison, model, args)


if __name__ == "__main__":
    sys.exit(main())
