"""Interactive serving: latency by request rate, four real servers in one run.

    python benchmarks/suites/bench_serving.py --save

After the RelayAttention paper's (arXiv 2402.14808) interactive workload: chats under one long
system prompt, Poisson arrivals, `vllm bench serve` as the client; first all at once, then rate by
rate. All servers are up, one at a time is under load, and each gets the same prompts.

``--dataset`` uses the client's own prompts instead: ``prefix_repetition`` (several prefixes),
``random`` (one), or ``timed_trace``, the requests of a trace (``--trace FILE``), shortened to the
CPU engine's blocks, their arrivals stretched to the rates; beside them is what `vllm-relay explain`
says of the trace. Their prefixes are not known beforehand, so no KV file holds them.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import traces
from benchmarks.harness.chat import asked, licence_prompt
from benchmarks.harness.environment import HUGE_PAGES, kv_gib, model_dtype, model_path
from benchmarks.harness.latin_square import save_engines
from benchmarks.harness.terminal import add_eager, add_save, at_least, make_console, step
from benchmarks.report.serving_figures import title_of
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving import comparison, gains
from vllm_relay.serving.commands import build_system_kv
from vllm_relay.serving.processes import kept_logs
from vllm_relay.serving.systems import FOUR, REFERENCE, SYSTEMS

ENV = {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib()), **HUGE_PAGES}
# Tokens of each request after the prefix, of the client's own datasets.
OWN = 64
# Context length beyond the prefix.
LONGER = 1024
TRACE = "timed_trace"


def chats(system: str, tokenizer: Any, args: argparse.Namespace, rate: float) -> Any:
    """Load factory: chats at this rate that share the system prompt."""
    count = requests_at(rate, args)

    def make(number: int) -> comparison.Load:
        prompts = comparison.render(tokenizer, system, asked(count, f"{number}, {rate:g}"))
        return comparison.Load(rate, count, args.tokens, prompts=prompts)

    return make


def requests_at(rate: float, args: argparse.Namespace) -> int:
    """Number of requests: ``--per-rate``, or ``--requests`` if all at once."""
    return args.requests if math.isinf(rate) else args.per_rate


def dataset_of(args: argparse.Namespace) -> dict[str, Any]:
    """Dataset options of ``vllm bench serve``; the seed of a round decides the prompts."""
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


def trace_loads(
    rows: Sequence[dict[str, Any]], args: argparse.Namespace, folder: Path
) -> list[Callable[[int], comparison.Load]]:
    """Load factories: part after part of a trace, round after round."""
    counts = [requests_at(rate, args) for rate in args.rates]

    def of(index: int, rate: float) -> Callable[[int], comparison.Load]:
        def make(number: int) -> comparison.Load:
            first = (number - 1) * sum(counts) + sum(counts[:index])
            part = rows[first : first + counts[index]]
            path = part_of(folder, rate, number)
            dataset = traces.write_dataset(part, path, len(part) / rate)
            mean = round(statistics.mean(row["output_length"] for row in part))
            return comparison.Load(rate, len(part), mean, dataset)

        return make

    return [of(index, rate) for index, rate in enumerate(args.rates)]


def part_of(folder: Path, rate: float, number: int) -> Path:
    """The file of a rate's requests in a round."""
    return folder / f"trace-{rate:g}-{number}.jsonl"


def add_predictions(rows: Sequence[dict[str, Any]], model: Path, folder: Path) -> None:
    """Give each row of a trace the predicted speed-up of attention, at vLLM's concurrency."""
    running = {(x["rate"], x["round"]): x["running"] for x in rows if x["system"] == REFERENCE}
    predicted = {
        of: traces.explain(part_of(folder, *of), "--concurrency", max(1, round(many)),
                           "--model", model)["predicted_speedup"]
        for of, many in running.items()
    }  # fmt: skip
    for row in rows:
        row["predicted_attention"] = round(predicted[row["rate"], row["round"]], 4)


def loads_of(
    system: str, tokenizer: Any, args: argparse.Namespace
) -> list[Callable[[int], comparison.Load]]:
    if args.dataset == "chat":
        return [chats(system, tokenizer, args, rate) for rate in args.rates]
    dataset = dataset_of(args)

    def same(rate: float) -> Callable[[int], comparison.Load]:
        return lambda number: comparison.Load(rate, requests_at(rate, args), args.tokens, dataset)

    return [same(rate) for rate in args.rates]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model; SmolLM2-135M by default")
    parser.add_argument(
        "--dataset", choices=["chat", "prefix_repetition", "random", TRACE], default="chat"
    )
    parser.add_argument(
        "--trace", type=Path, help=f"of {TRACE}: lines with hash_ids, as Mooncake's traces have"
    )
    parser.add_argument(
        "--prefix-tokens", type=int, default=4000,
        help=f"of the system prompt or the prefixes; {LONGER:,} less than the context length",
    )  # fmt: skip
    parser.add_argument("--prefixes", type=int, default=1, help="of prefix_repetition")
    parser.add_argument("--requests", type=int, default=32, help="served at once, at most")
    parser.add_argument("--tokens", type=int, default=48, help="that each request gets")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[math.inf, 0.5, 1.0, 2.0, 4.0],
        help="requests per second; inf: all at once",
    )  # fmt: skip
    parser.add_argument("--per-rate", type=at_least(2), default=200, help="requests of each rate")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--systems", nargs="+", choices=FOUR, default=list(FOUR))
    parser.add_argument(
        "--bound",
        type=float,
        default=0.1,
        help="seconds per token of the sustained rate; systems that miss it by 2x are skipped at "
        "higher rates",
    )
    add_eager(parser)
    add_save(parser)
    args = parser.parse_args(argv)
    if REFERENCE not in args.systems:
        parser.error(f"--systems: {REFERENCE} is what the others are compared with")
    if (args.dataset == TRACE) != (args.trace is not None):
        parser.error(f"--trace is the file of --dataset {TRACE}")
    if not all(rate > 0 for rate in args.rates):
        parser.error("--rates: each must be more than 0")
    requests, left_out = [], 0
    if args.trace is not None:
        try:
            requests, left_out = traces.read_shortened(args.trace, args.prefix_tokens + LONGER)
        except (OSError, ValueError) as error:
            parser.error(f"--trace: {error}")
        needed = args.repeats * sum(requests_at(rate, args) for rate in args.rates)
        if len(requests) < needed:
            parser.error(f"--trace: {len(requests):,} requests, of {needed:,} needed")
    console = make_console()
    model = args.model or model_path()
    try:
        system = licence_prompt(
            Tokenizer.from_file(str(model / "tokenizer.json")), args.prefix_tokens
        )
    except ValueError as error:
        parser.error(f"--prefix-tokens: {error}")
    keys = [x for x in args.systems if args.dataset == "chat" or not SYSTEMS[x].system_kv]
    # The client's own prompts do not have exactly the lengths that they are to have.
    flags = ["--max-model-len", str(args.prefix_tokens + LONGER)]
    flags += ["--dtype", model_dtype(), *(["--enforce-eager"] if args.eager else [])]
    flags += ["--max-num-seqs", str(args.requests)]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    # Under as many prefixes as the client's dataset has.
    prefixes = args.prefixes if args.dataset == "prefix_repetition" else 1
    systems = [system, *(f"({i}) {system}" for i in range(1, prefixes))]
    checked = [
        prompt
        for i, text in enumerate(systems)
        for prompt in comparison.render(tokenizer, text, asked(args.requests, "check")[i::prefixes])
    ]
    try:
        with ExitStack() as stack:
            stack.enter_context(ended_in_order())
            report = stack.enter_context(step(console, "serving"))
            folder = stack.enter_context(kept_logs("vllm-relay-serving-"))
            files = []
            if any(SYSTEMS[key].system_kv for key in keys):
                text = folder / "prompt.txt"
                text.write_text(system)
                options = ["--system-prompt", str(text), *flags]
                file = folder / "prompt.relay"
                files = [build_system_kv(model, file, options, env=ENV, report=report)]
            if args.trace is None:
                loads = loads_of(system, tokenizer, args)
            else:
                loads = trace_loads(requests, args, folder)
            rows = comparison.compare(
                model, keys, [*flags, "--disable-uvicorn-access-log"], loads, args.repeats, folder,
                checked=checked, files=files, env=ENV, give_up=2 * args.bound, report=report,
            )  # fmt: skip
            if args.trace is not None:
                report("predictions")
                add_predictions(rows, model, folder)
    except RuntimeError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    what = args.dataset
    of_all = {"model": model.name, "dataset": what, "prefix_tokens": args.prefix_tokens}
    if args.trace is not None:
        what = args.trace.stem.removeprefix("mooncake_")
        left_out /= left_out + len(requests)
        of_all |= {"dataset": what, "prefix_tokens": "", "left_out": round(left_out, 4)}
    rows = [{**of_all, "bound_s": args.bound, "kv_gib": kv_gib(), **row} for row in rows]
    gains.show(console, f"{title_of(rows[0])} (medians of rounds)", rows, args.bound)
    if args.save:
        name = "serving" if args.dataset == "chat" else f"serving-{what}"
        save_engines(console, name, rows, args.eager)
    return 0


if __name__ == "__main__":
    sys.exit(main())
