"""Questions about one long document, all at once: time by number of questions.

    python benchmarks/suites/bench_needles.py --text FILE --save

Hydragen's (arXiv 2402.05099, section 4.3) task: facts are planted in a real text, and each question
asks for one of them. Right answers are counted; the engine that skips attention is the ceiling.
The context of a model that is too short for the document is stretched by YaRN.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.engines import Answer, Limits
from benchmarks.harness.environment import ROOT, model_path
from benchmarks.harness.latin_square import Comparison, Round, Workload, add_options, run
from vllm_relay.serving.systems import FOUR

KEYS = (*FOUR, "no-attention")
NAMES = (
    *("Anna", "Boris", "Clara", "Dmitri", "Elena", "Fedor", "Galina", "Hugo", "Irina", "Jakob"),
    *("Katya", "Leo", "Marya", "Nikolai", "Olga", "Pavel", "Quentin", "Rosa", "Sonya", "Timur"),
    *("Ursula", "Viktor", "Wanda", "Xenia", "Yuri", "Zoya"),
)
WORDS = ("amber", "birch", "cobalt", "dune", "ember", "fjord", "grove", "heron", "ivory", "jade")
FACT = "The secret word of {name} is {word}. "


def plant(text: str, facts: int, seed: int) -> tuple[str, list[tuple[str, str]]]:
    """A text with facts between its sentences, evenly spread; and (name, word) of each."""
    rng = np.random.default_rng(seed)
    names = [NAMES[i % len(NAMES)] + ("" if i < len(NAMES) else f" {i}") for i in range(facts)]
    planted = [(name, WORDS[int(rng.integers(len(WORDS)))]) for name in names]
    sentences = text.replace("\n", " ").split(". ")
    every = max(1, len(sentences) // (facts + 1))
    for number, (name, word) in reversed(list(enumerate(planted))):
        sentences.insert(every * (number + 1), FACT.format(name=name, word=word).rstrip(". "))
    return ". ".join(sentences), planted


def make_workloads(tokenizer: Any, args: argparse.Namespace) -> tuple[list[int], list[Workload]]:
    """The document's tokens, and a case per number of questions."""
    text = args.text.read_text(encoding="utf-8-sig")
    # About four characters a token, and some to spare for cutting.
    document, planted = plant(text[: 5 * args.document], args.facts, 0)
    places = tokenizer(document, add_special_tokens=False, return_offsets_mapping=True)
    if len(places["input_ids"]) < args.document:
        raise SystemExit(f"{args.text} has fewer than {args.document:,} tokens: --document")
    document = document[: places["offset_mapping"][args.document - 1][1]]
    known = [(n, w) for n, w in planted if FACT.format(name=n, word=w).rstrip(". ") in document]
    if not known:
        raise SystemExit(f"{args.document:,} tokens of {args.text} hold no fact: --document")

    def ask(mark: str, name: str) -> list[int]:
        # A sentence to be ended: small models do that better than they answer questions in a chat.
        begun = FACT.partition("{word}")[0].format(name=name).rstrip()
        text = f"{document}\n\n({mark}) {begun}"
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def make_workload(count: int) -> Workload:
        asked = [known[i % len(known)] for i in range(count)]

        def make_round(number: int) -> Round:
            # Asked otherwise in each round, so that only the document is shared.
            prompts = [ask(f"{number}, {i}", name) for i, (name, _) in enumerate(asked)]
            return prompts, [args.steps] * count

        def right(number: int, answers: list[Answer]) -> int:
            texts = [tokenizer.decode([token for token, *_ in answer]) for answer in answers]
            return sum(word in text.lower() for text, (_, word) in zip(texts, asked, strict=True))

        return Workload(
            {"document_tokens": args.document, "questions": count}, make_round, right=right
        )

    first, second = ask("A", "A"), ask("B", "B")
    same = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[:same], [make_workload(count) for count in args.questions]


def stretched(model: Path, tokens: int, folder: Path) -> Path:
    """The model, if so many tokens fit; else a copy in ``folder`` with more positions.

    The weights are links: YaRN (arXiv 2309.00071) scales rotations.
    """
    config = json.loads((model / "config.json").read_text())
    own = config["max_position_embeddings"]
    if tokens <= own:
        return model
    factor = -(-tokens // own)
    config["max_position_embeddings"] = factor * own
    rope = config.pop("rope_parameters", None) or config
    if rope.get("rope_type", "default") != "default" or config.pop("rope_scaling", None):
        raise SystemExit(f"{model}: its positions are stretched already: --document")
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": rope["rope_theta"],
        "factor": float(factor),
        "original_max_position_embeddings": own,
    }
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model; SmolLM2-135M by default")
    parser.add_argument(
        "--text",
        type=Path,
        default=ROOT / "benchmarks" / "harness" / "text" / "gpl-3.txt",
        help="the document, UTF-8; a licence by default, a novel is better",
    )
    parser.add_argument("--document", type=int, default=4096, help="tokens of it")
    parser.add_argument("--facts", type=int, default=16)
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=16, help="tokens of each answer")
    add_options(parser, repeats=3, keys=KEYS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    model = args.model or model_path()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prefix, cases = make_workloads(tokenizer, args)
    limits = Limits(len(prefix) + 64 + args.steps, max(args.questions), eager=args.eager)
    title, columns = f"questions about {args.document:,} tokens", ("questions", "right")
    with tempfile.TemporaryDirectory(prefix="vllm-relay-model-") as folder:
        fitting = stretched(model, limits.max_model_len, Path(folder))
        name = "needles" if fitting == model else "needles-stretched"
        return run(Comparison(name, title, columns, KEYS, limits, cases, [prefix]), fitting, args)


if __name__ == "__main__":
    sys.exit(main())
