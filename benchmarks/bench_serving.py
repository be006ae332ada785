"""Interactive serving: latency against the rate of requests, four real servers in one run.

    python benchmarks/bench_serving.py --save

After the RelayAttention paper's (arXiv 2402.14808) interactive workload: chats under one long
system prompt, Poisson arrivals, `vllm bench serve` as the client; first everything at once, then
rate by rate. All servers are up, one is at work at a time, and each gets the same prompts.

``--dataset`` takes the client's own prompts in their place: ``prefix_repetition`` (several
prefixes) or ``random`` (one). No KV file holds their prefixes, which nobody knows beforehand.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.chat import licence_prompt, questions
from benchmarks.common import model_path, step
from benchmarks.turns import make_console, save
from vllm_relay.bench import gains, serving
from vllm_relay.bench.processes import build_system_kv
from vllm_relay.bench.systems import FOUR, REFERENCE, SYSTEMS

ENV = {"VLLM_CPU_KVCACHE_SPACE": "2"}
# Tokens of each request after the prefix, of the client's own datasets.
OWN = 64


def chats(system: str, tokenizer: Any, args: argparse.Namespace, rate: float) -> Any:
    """Makes the chats of a round at this rate: what they share is the system prompt."""
    topics = questions(min(args.requests, 96))

    def make(number: int) -> serving.Load:
        asked = [
            f"{topics[i % len(topics)]} ({number}, {rate:g}, {i})" for i in range(args.requests)
        ]
        prompts = serving.render(tokenizer, system, asked)
        return serving.Load(rate, args.requests, args.tokens, prompts=prompts)

    return make


def dataset_of(args: argparse.Namespace) -> dict[str, Any]:
    """Options of ``vllm bench serve``; which prompts they make is up to the seed of a round."""
    if args.dataset == "random":
        lengths = {"prefix-len": args.prefix_tokens, "input-len": OWN, "output-len": args.tokens}
        named = {f"random-{name}": value for name, value in lengths.items()}
    else:
        named = {
            "prefix-repetition-prefix-len": args.prefix_tokens,
            "prefix-repetition-suffix-len": OWN,
            "prefix-repetition-num-prefixes": args.prefixes,
            "prefix-repetition-output-len": args.tokens,
        }
    return {"dataset-name": args.dataset, **named}


def loads_of(
    system: str, tokenizer: Any, args: argparse.Namespace
) -> list[Callable[[int], serving.Load]]:
    rates = [serving.EVERYTHING_AT_ONCE, *args.rates]
    if args.dataset == "chat":
        return [chats(system, tokenizer, args, rate) for rate in rates]
    dataset = dataset_of(args)

    def same(rate: float) -> Callable[[int], serving.Load]:
        return lambda number: serving.Load(rate, args.requests, args.tokens, dataset)

    return [same(rate) for rate in rates]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model; SmolLM2-135M by default")
    parser.add_argument(
        "--dataset", choices=["chat", "prefix_repetition", "random"], default="chat"
    )
    parser.add_argument(
        "--prefix-tokens", type=int, default=4000, help="of the system prompt or the prefixes"
    )
    parser.add_argument("--prefixes", type=int, default=1, help="of prefix_repetition")
    parser.add_argument("--requests", type=int, default=32, help="of each measurement")
    parser.add_argument("--tokens", type=int, default=48, help="that each request gets")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[0.5, 1.0, 2.0, 4.0], help="requests per second"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(FOUR))
    parser.add_argument(
        "--bound", type=float, default=0.1, help="seconds per token, for the sustained rate"
    )
    parser.add_argument("--save", action="store_true", help="write a CSV to benchmarks/results")
    args = parser.parse_args(argv)
    if REFERENCE not in args.systems:
        parser.error(f"--systems: {REFERENCE} is what the others are compared with")
    if not all(SYSTEMS[key].attention for key in args.systems):
        parser.error("--systems: a server that skips attention answers nothing")
    console = make_console()
    model = args.model or model_path()
    system = licence_prompt(Tokenizer.from_file(str(model / "tokenizer.json")), args.prefix_tokens)
    keys = [x for x in args.systems if args.dataset == "chat" or not SYSTEMS[x].system_kv]
    # The client's own prompts do not have exactly the lengths that they are to have.
    flags = ["--enforce-eager", "--max-model-len", str(args.prefix_tokens + 1024)]
    flags += ["--max-num-seqs", str(args.requests)]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [f"{topic} (check)" for topic in questions(serving.CHECKED)]
    checked = serving.render(tokenizer, system, asked)
    loads = loads_of(system, tokenizer, args)
    with tempfile.TemporaryDirectory() as name, step(console, "serving") as report:
        folder = Path(name)
        files = []
        if any(SYSTEMS[key].system_kv for key in keys):
            text = folder / "prompt.txt"
            text.write_text(system)
            files = [build_system_kv(model, text, flags, env=ENV, report=report)]
        try:
            rows = serving.compare(
                model, keys, [*flags, "--disable-uvicorn-access-log"], loads, args.repeats, folder,
                checked=checked, files=files, env=ENV, report=report,
            )  # fmt: skip
        except serving.WrongAnswers as error:
            console.print(f"[red]{error}[/]")
            return 1
    of_all = {"model": model.name, "dataset": args.dataset, "prefix_tokens": args.prefix_tokens}
    rows = [{**of_all, "bound_s": args.bound, **row} for row in rows]
    title = f"{args.dataset}: a prefix of {args.prefix_tokens:,} tokens (medians of rounds)"
    gains.show(console, title, rows, args.bound)
    largest = max(row["logprob_rms"] for row in rows)
    console.print(f"log-probabilities differ from vLLM's by {largest:.4f} nats (rms) at most")
    if args.save:
        save(console, "serving" if args.dataset == "chat" else f"serving-{args.dataset}", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
