"""One system prompt, many users: stock vLLM and vllm-relay serve the same load, side by side.

    python benchmarks/demo.py            (`make demo` also sets everything up)

Each backend gets a real `vllm serve`, the same chat requests and the same `vllm bench serve`.
"""

import argparse
import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
from common import (
    MODEL_NAME,
    ROOT,
    Server,
    bench_serve,
    model_path,
    provenance,
    serving,
    step,
    write_csv,
)
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

LICENCES = (
    Path("/usr/share/common-licenses/GPL-3"),
    Path(__file__).parent / "text" / "gpl-3.txt",
)
SYSTEM = "You answer questions about the following licence. Answer briefly.\n\n"
TOPICS = (
    "Who wrote this licence?",
    "What is its version number?",
    "In which year was it published?",
    "May I sell copies of the program?",
    "May I change the program for myself?",
    "What does 'copyleft' mean?",
    "What is a 'covered work'?",
    "What does 'to propagate' mean?",
    "What does 'to convey' mean?",
    "What is the 'source code' of a work?",
    "What is 'object code'?",
    "What are 'System Libraries'?",
    "What is the 'Corresponding Source'?",
    "Does the licence come with a warranty?",
    "May others change the licence text?",
    "What does 'free' refer to in 'free software'?",
    "Can patents make the program proprietary?",
    "What must I do when I convey verbatim copies?",
    "Must I mark the files that I changed?",
    "What is an 'aggregate'?",
    "What is a 'User Product'?",
    "What is 'Installation Information'?",
    "Does the licence apply when I only run the program?",
    "What are 'additional permissions'?",
)
SHOWN = 6  # answers printed in full


@dataclass(frozen=True)
class Answer:
    """One chat answer: its text, its token ids, and per token the log-probability (nats) and the
    lead of the chosen token over the second best."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    leads: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """What one backend did."""

    label: str
    answers: list[Answer]
    bench: dict[str, Any]
    counters: dict[str, int]
    sharing: str | None


def licence_prompt(tokenizer: Tokenizer, tokens: int) -> str:
    """The system prompt: the instruction and the first `tokens` tokens of the GPL."""
    text = next(path for path in LICENCES if path.is_file()).read_text()
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    return SYSTEM + text[: offsets[min(tokens, len(offsets)) - 1][1]]


def questions(count: int) -> list[str]:
    """`count` different short questions."""
    rounds = ("", " Give one example.", " Explain it to a child.", " Answer in one sentence.")
    asked = [topic + extra for extra in rounds for topic in TOPICS]
    if not 1 <= count <= len(asked):
        raise ValueError(f"--requests is {count}: from 1 to {len(asked)} questions exist")
    return asked[:count]


def labels(backends: list[str]) -> list[str]:
    """ "relay" or "stock" per backend, numbered where a name comes twice."""
    names = ["relay" if name.lower() == "relay" else "stock" for name in backends]
    return [
        name if names.index(name) == i else f"{name}-{names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def parting(first: Answer, second: Answer) -> tuple[int | None, float]:
    """Index of the first token that differs (None: identical), and the largest difference of
    log-probabilities (nats) over the tokens before it."""
    both = min(len(first.tokens), len(second.tokens))
    differ = (i for i in range(both) if first.tokens[i] != second.tokens[i])
    same = next(differ, both)
    identical = same == len(first.tokens) == len(second.tokens)
    pairs = zip(first.logprobs[:same], second.logprobs[:same], strict=True)
    return (None if identical else same), max((abs(a - b) for a, b in pairs), default=0.0)


def relay_counters(log: str) -> dict[str, int]:
    """The counters of the last `relay: steps=… kv_bytes_not_read=…` line; {} without one."""
    lines = re.findall(r"relay: (.*\bsteps=\d.*)", log)
    return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", lines[-1])} if lines else {}


def sharing_line(log: str) -> str | None:
    """The line that says who shares what; None if sharing never started."""
    found = re.search(r"\d[\d,]* requests share [\d,]+ tokens in .*", log)
    return found[0].strip() if found else None


def human_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


async def ask(
    server: Server, system: str, asked: list[str], tokens: int, report: Callable[[str], None]
) -> list[Answer]:
    """All questions at once, after one warm-up request that fills the prefix cache."""
    done = 0

    async def one(client: openai.AsyncOpenAI, question: str) -> Answer:
        nonlocal done
        reply = await client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
            temperature=0,
            max_completion_tokens=tokens,
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_tokens_as_token_ids": True},
        )
        done += 1
        choice = reply.choices[0]
        steps = (choice.logprobs and choice.logprobs.content) or []
        return Answer(
            text=(choice.message.content or "").strip(),
            tokens=tuple(s.token for s in steps),
            logprobs=tuple(s.logprob for s in steps),
            leads=tuple(s.top_logprobs[0].logprob - s.top_logprobs[-1].logprob for s in steps),
        )

    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        report("warm-up request")
        await one(client, "Hello.")
        done = 0
        waiting = asyncio.gather(*(one(client, question) for question in asked))
        while not waiting.done():
            report(f"{done} of {len(asked)} answers")
            await asyncio.wait([waiting], timeout=0.5)
        return await waiting


def run_backend(
    backend: str, label: str, args: argparse.Namespace, folder: Path, console: Console
) -> Run:
    """Serve with `backend`, ask, measure, stop; the counters appear in the log as it stops."""
    model = model_path()
    system = licence_prompt(Tokenizer.from_file(str(model / "tokenizer.json")), args.prompt_tokens)
    flags = f"--served-model-name {MODEL_NAME} --attention-backend {backend}"
    flags += f" --enable-prefix-caching --max-num-seqs {max(32, args.requests)}"
    flags += " --max-model-len 8192 --generation-config vllm --disable-uvicorn-access-log"
    # Compiling takes a minute or more per server on two cores and leaves attention as it is.
    flags += " --enforce-eager"
    # The engine gets time to end in order: relay logs its counters on the way out.
    flags += " --shutdown-timeout 10"
    env = {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib)}
    log = folder / f"{label}.log"
    console.print(f"\n[bold]{label}[/]  vllm serve --attention-backend {backend}", highlight=False)
    with ExitStack() as stack:
        with step(console, "server") as report:
            server = stack.enter_context(serving(model, flags.split(), log, env=env, report=report))
        with step(console, "chat") as report:
            asked = questions(args.requests)
            answers = asyncio.run(ask(server, system, asked, args.max_tokens, report))
        with step(console, "vllm bench serve") as report:
            bench = bench_serve(server, model, bench_options(args), report)
    text = log.read_text(errors="replace")
    return Run(label, answers, bench, relay_counters(text), sharing_line(text))


def bench_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of `vllm bench serve`: every request starts with the same prefix."""
    return {
        "dataset-name": "prefix_repetition",
        "prefix-repetition-num-prefixes": 1,
        "prefix-repetition-prefix-len": args.prompt_tokens,
        "prefix-repetition-suffix-len": 64,
        "prefix-repetition-output-len": 64,
        "num-prompts": 2 * args.requests,
        "max-concurrency": args.requests,
        "num-warmups": 1,  # both start from a cached prefix, as a server in use would
        "seed": 0,
    }


def show_answers(console: Console, asked: list[str], first: Run, second: Run) -> None:
    """Answers side by side, then how many agree, and where and how narrowly the others part."""
    table = Table(title="The same questions", show_lines=True, expand=True)
    table.add_column("question", ratio=2)
    table.add_column(first.label, ratio=4)
    table.add_column(second.label, ratio=4)
    answers = list(zip(first.answers, second.answers, strict=True))
    for question, (a, b) in list(zip(asked, answers, strict=True))[:SHOWN]:
        same = parting(a, b)[0] is None
        table.add_row(question, a.text, "[dim](the same, token for token)[/]" if same else b.text)
    console.print(table)
    parted = [(i, at) for i, (a, b) in enumerate(answers) if (at := parting(a, b)[0]) is not None]
    agree = len(answers) - len(parted)
    console.print(f"[bold]{agree} of {len(answers)} answers identical, token for token.[/]")
    for i, at in parted:
        where = f"  question {i + 1} parts at token {at + 1}"
        if at < len(leads := first.answers[i].leads):
            where += f", where {first.label}'s best token led by {leads[at]:.3f} nats"
        console.print(where, highlight=False)
    largest = max(parting(a, b)[1] for a, b in answers)
    console.print(f"Largest log-probability difference before a parting: {largest:.4f} nats.")
    if parted:
        console.print(
            "[dim]A small bf16 model often has two best tokens that nearly tie; another order of "
            "summation then flips the choice.[/]"
        )


def show_numbers(console: Console, first: Run, second: Run) -> None:
    """The table of speed, as `vllm bench serve` measured it."""
    table = Table(title="vllm bench serve, one shared prefix")
    for heading in ("metric", first.label, second.label, f"{second.label} / {first.label}"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for title, key in (
        ("TTFT, median (ms, lower is better)", "median_ttft_ms"),
        ("TPOT, median (ms, lower is better)", "median_tpot_ms"),
        ("throughput (tokens/s, higher is better)", "output_throughput"),
    ):
        a, b = first.bench[key], second.bench[key]
        table.add_row(title, f"{a:,.1f}", f"{b:,.1f}", f"{b / a:.2f} x")
    skipped = [human_bytes(run.counters.get("kv_bytes_not_read", 0)) for run in (first, second)]
    table.add_row("KV bytes not read (chat and bench)", *skipped, "")
    console.print(table)
    for run in (first, second):
        if run.sharing:
            console.print(f"{run.label}: {run.sharing}", highlight=False)
        if run.counters:
            counts = ", ".join(f"{k} {v:,}" for k, v in run.counters.items())
            console.print(f"[dim]{run.label}: {counts}[/]", highlight=False)


def csv_rows(runs: list[Run], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per backend: the load, the medians, the agreement with the first, the counters."""
    rows = []
    for run in runs:
        pairs = [parting(a, b) for a, b in zip(runs[0].answers, run.answers, strict=True)]
        rows.append(
            {
                "backend": run.label,
                "requests": args.requests,
                "prompt_tokens": args.prompt_tokens,
                "ttft_median_ms": f"{run.bench['median_ttft_ms']:.3f}",
                "tpot_median_ms": f"{run.bench['median_tpot_ms']:.3f}",
                "output_tokens_per_s": f"{run.bench['output_throughput']:.3f}",
                "answers_identical": sum(at is None for at, _ in pairs),
                "max_logprob_difference": f"{max(difference for _, difference in pairs):.6f}",
                **run.counters,
            }
        )
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", nargs=2, default=["CPU_ATTN", "relay"], metavar="NAME")
    parser.add_argument("--requests", type=int, default=24, help="concurrent requests")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="length of the prefix")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of one chat answer")
    parser.add_argument("--kv-gib", type=int, default=2, help="KV cache of a server, GiB")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="folder for logs and results")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="tiny numbers: does it run at all?")
    args = parser.parse_args(argv)
    if args.quick:
        args.requests, args.prompt_tokens, args.max_tokens = 4, 600, 8
    limits = {"requests": 96, "prompt_tokens": 7500, "max_tokens": 256, "kv_gib": 1024}
    for name, high in limits.items():
        if not 1 <= (value := getattr(args, name)) <= high:
            parser.error(f"--{name.replace('_', '-')} is {value}: must be from 1 to {high}")
    return args


def main() -> int:
    args = parse()
    console = Console(width=None if sys.stdout.isatty() else 100)
    # A plain SIGTERM would end Python without the clean-up that stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = args.keep_logs or ROOT / ".demo" / f"{datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    if not args.keep_logs:
        (ROOT / ".demo" / ".gitignore").write_text("*\n")
    started = time.monotonic()
    console.print(
        f"{args.requests} concurrent chats, one system prompt of {args.prompt_tokens:,} tokens, "
        f"two servers in turn.\nLogs and results: {folder}",
        highlight=False,
    )
    try:
        runs = [
            run_backend(backend, label, args, folder, console)
            for backend, label in zip(args.backends, labels(args.backends), strict=True)
        ]
    except (RuntimeError, OSError, openai.OpenAIError) as error:
        console.print(f"\n[red]failed:[/] {type(error).__name__}", highlight=False)
        console.print(str(error), markup=False, highlight=False)
        console.print(f"Logs: {folder}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print(f"\nstopped; logs: {folder}", highlight=False)
        return 130
    for run in runs:
        saved = [asdict(answer) for answer in run.answers]
        (folder / f"{run.label}-answers.json").write_text(json.dumps(saved, indent=1))
    console.print()
    show_answers(console, questions(args.requests), *runs)
    console.print()
    show_numbers(console, *runs)
    rows, prov = csv_rows(runs, args), provenance()
    written = [write_csv(folder / "demo.csv", rows, prov)]
    if args.save:
        written.append(write_csv(ROOT / "benchmarks" / "results" / "demo.csv", rows, prov))
    console.print(f"\nFinished in {time.monotonic() - started:.0f} s. Logs and results: {folder}")
    console.print("CSV: " + ", ".join(str(path) for path in written), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
