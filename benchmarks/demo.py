"""One system prompt, many users: stock vLLM and vllm-relay serve the same load, side by side.

    python benchmarks/demo.py            (`make demo` also sets everything up)

Each backend gets a real `vllm serve`, the same chat requests and the same `vllm bench serve`. A
third server starts with the KV of the system prompt, from a file that `vllm-relay build` makes.
`benchmarks/report/demo_tables.py` prints the results.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.chat import ask, first_ttft, licence_prompt, questions
from benchmarks.harness.environment import MODEL_NAME, RESULTS, ROOT, model_dtype, model_path
from benchmarks.harness.result_csv import source, write_csv
from benchmarks.harness.terminal import step
from benchmarks.report.demo_tables import Run, csv_rows, show_agreement, show_answers, show_numbers
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving.commands import bench_serve, build_system_kv
from vllm_relay.serving.comparison import relay_counters
from vllm_relay.serving.processes import serving

# `vllm bench serve` says nothing new about the third server: it may take this many seconds there.
BENCH_LIMIT = 60.0
SYSTEM_KV_FLAG = "--additional-config.relay.system_kv"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def number(name: str, default: int, text: str) -> None:
        text = f"{text} (default: {default})"
        parser.add_argument(name, type=int, default=default, metavar="N", help=text)

    parser.add_argument(
        "--backends",
        nargs=2,
        default=["CPU_ATTN", "relay"],
        metavar="NAME",
        help="the two attention backends to compare (default: CPU_ATTN relay)",
    )
    parser.add_argument(
        "--no-system-kv", action="store_true", help="leave out the server with a system KV"
    )
    number("--requests", 24, "chats at the same time")
    number("--prompt-tokens", 4000, "length of the shared prompt in tokens")
    number("--max-tokens", 48, "most tokens in one answer")
    number("--kv-gib", 2, "size of each KV cache in GiB")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="folder for logs and results")
    parser.add_argument(
        "--save", action="store_true", help="also write the CSV to benchmarks/results/"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a fixed small load, to see that everything runs"
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.requests, args.prompt_tokens, args.max_tokens = 8, 1500, 8
    limits = {"requests": 96, "prompt_tokens": 7500, "max_tokens": 256, "kv_gib": 1024}
    for name, high in limits.items():
        if not 1 <= (value := getattr(args, name)) <= high:
            parser.error(f"--{name.replace('_', '-')} is {value}: must be from 1 to {high}")
    return args


def run_all(args: argparse.Namespace, folder: Path, console: Console) -> list[Run]:
    """Runs one server per backend, then the second again with a system KV."""
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    system = licence_prompt(tokenizer, args.prompt_tokens)
    runs: list[Run] = []
    for backend, label in zip(args.backends, labels(args.backends), strict=True):
        console.print(f"\n[bold]{label}[/]  {shown_command(backend)}")
        runs.append(run_server(backend, label, system, args, folder, console, control=not runs))
    if args.no_system_kv:
        return runs
    backend, label = args.backends[1], f"{runs[1].label}+kv"
    prompt = folder / "licence.txt"
    prompt.write_text(system)
    name = prompt.with_suffix(".relay").name
    console.print(f"\n[bold]{label}[/]  {shown_command(backend, name)}")
    with step(console, "build system KV") as report:
        env = engine_env(args)
        options = ["--system-prompt", str(prompt), *engine_flags()]
        file = build_system_kv(
            model_path(), prompt.with_suffix(".relay"), options, env=env, report=report
        )
    bench = runs[1].bench_seconds <= BENCH_LIMIT
    runs.append(
        run_server(backend, label, system, args, folder, console, system_kv=file, bench=bench)
    )
    return runs


def labels(backends: list[str]) -> list[str]:
    """ "relay" or "stock" per backend, numbered where a name comes twice."""
    names = ["relay" if name.lower() == "relay" else "stock" for name in backends]
    return [
        name if names.index(name) == i else f"{name}-{names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def shown_command(backend: str, system_kv: str | None = None) -> str:
    """The part of a server's command line that matters."""
    command = f"vllm serve --attention-backend {backend}"
    return f"{command} {SYSTEM_KV_FLAG} {system_kv}" if system_kv else command


def engine_flags() -> list[str]:
    """Options of every engine, that of the build included.

    Compiling takes a minute or more per server on two cores and leaves attention as it is.
    """
    return ["--enforce-eager", "--max-model-len", "8192", "--dtype", model_dtype()]


def engine_env(args: argparse.Namespace) -> dict[str, str]:
    """Environment of every engine, that of the build included."""
    return {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib)}


def run_server(
    backend: str,
    label: str,
    system: str,
    args: argparse.Namespace,
    folder: Path,
    console: Console,
    *,
    control: bool = False,
    system_kv: Path | None = None,
    bench: bool = True,
) -> Run:
    """Serve with `backend`, ask, measure, stop.

    With `control` it answers twice, the second time in batches of half the size: how far it then
    is from itself is the measure for how far another server may be from it. `system_kv` is a
    file to load. Without `bench` the `vllm bench serve` part is left out.

    Raises:
        RuntimeError: a process ended, a request failed, or a system KV was not loaded.
    """
    model = model_path()
    flags = f"--served-model-name {MODEL_NAME} --attention-backend {backend}"
    flags += f" --enable-prefix-caching --max-num-seqs {max(32, args.requests)}"
    flags += " --generation-config vllm --disable-uvicorn-access-log"
    # The engine gets time to end in order: relay logs its counters on the way out.
    flags += " --shutdown-timeout 10"
    options = [*flags.split(), *engine_flags()]
    if system_kv is not None:
        options += [SYSTEM_KV_FLAG, str(system_kv)]
    env = engine_env(args)
    log = folder / f"{label}.log"
    rounds = [("chat", args.requests)]
    if control:
        rounds.append(("chat again, half at a time", max(1, args.requests // 2)))
    with ExitStack() as stack:
        with step(console, "server") as report:
            server = stack.enter_context(serving(model, options, log, env=env, report=report))
        with step(console, "first request") as report:
            ttft = first_ttft(server, system, report)
        sets = []
        for title, at_once in rounds:
            with step(console, title) as report:
                sent = ask(
                    server,
                    system,
                    questions(args.requests),
                    at_once=at_once,
                    tokens=args.max_tokens,
                    report=report,
                )
                sets.append(asyncio.run(sent))
        measured, started = None, time.monotonic()
        if bench:
            with step(console, "vllm bench serve") as report:
                measured = bench_serve(server, bench_options(args), report)
        seconds = time.monotonic() - started
    text = log.read_text(errors="replace")
    found = system_kv_lines(text)
    if system_kv is not None and not found:
        raise RuntimeError(f"{label} should have loaded a system KV; its log shows none: {log}")
    return Run(
        label=label,
        first_ttft=ttft,
        answers=sets[0],
        again=sets[-1],
        bench=measured,
        bench_seconds=seconds,
        counters=relay_counters(text),
        sharing=sharing_line(text),
        system_kv=found,
    )


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
        "num-warmups": 1,  # all start from a cached prefix, as a server in use would
        "seed": 0,
    }


def sharing_line(log: str) -> str | None:
    """The line that says who shares what; None if sharing never started."""
    found = re.search(r"\d[\d,]* requests share [\d,]+ tokens in .*", log)
    return found[0].strip() if found else None


def system_kv_lines(log: str) -> tuple[str, ...]:
    """Log messages on system KV: pinned tokens of each file, without its path; the load rate."""
    pattern = r"relay: (system KV .+? tokens pinned in \d+ blocks?|wrote \d+ system KV.* GB/s)"
    return tuple(re.findall(pattern, log))


def main() -> int:
    args = parse()
    # Without a terminal rich assumes 80 columns; the speed table needs more.
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    folder = args.keep_logs or ROOT / ".demo" / f"{datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    if not args.keep_logs:
        (ROOT / ".demo" / ".gitignore").write_text("*\n")
    started = time.monotonic()
    console.print(
        f"{args.requests} concurrent chats, one system prompt of {args.prompt_tokens:,} tokens, "
        f"{'two' if args.no_system_kv else 'three'} servers in turn.\nLogs and results: {folder}"
    )
    if (dtype := model_dtype()) != "auto":
        console.print(f"Models run in {dtype}: this CPU has no instructions for bf16 products.")
    try:
        runs = run_all(args, folder, console)
    except (RuntimeError, OSError, openai.OpenAIError) as error:
        console.print(f"\n[red]failed:[/] {type(error).__name__}")
        console.print(str(error), markup=False, soft_wrap=True)
        console.print(f"Logs: {folder}")
        return 1
    except KeyboardInterrupt:
        console.print(f"\nStopped. Logs: {folder}")
        return 130
    for run in runs:
        saved = [asdict(answer) for answer in run.answers]
        (folder / f"{run.label}-answers.json").write_text(json.dumps(saved, indent=1))
    console.print()
    show_answers(console, questions(args.requests), runs)
    console.print()
    if not show_agreement(console, runs):
        console.print(f"The answers differ too much to compare speed. Logs and answers: {folder}")
        return 1
    console.print()
    show_numbers(console, runs)
    rows, columns = csv_rows(runs, args), source() | {"dtype": model_dtype()}
    written = [write_csv(folder / "demo.csv", rows, columns)]
    if args.save:
        written.append(write_csv(RESULTS / "demo.csv", rows, columns))
    console.print(f"\nFinished in {time.monotonic() - started:.0f} s. Logs and results: {folder}")
    console.print("CSV: " + ", ".join(str(path) for path in written))
    return 0


if __name__ == "__main__":
    with ended_in_order():
        sys.exit(main())
