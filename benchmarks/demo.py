"""One system prompt, many users: stock vLLM and vllm-relay serve the same load, side by side.

    python benchmarks/demo.py            (`make demo` also sets everything up)

Each backend gets a real `vllm serve`, the same chat requests and the same `vllm bench serve`. A
third server starts with the KV of the system prompt, from a file that `vllm-relay build` makes.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.chat import (
    Answer,
    agreement,
    ask,
    first_ttft,
    lead,
    licence_prompt,
    questions,
)
from benchmarks.common import (
    MODEL_NAME,
    ROOT,
    bench_serve,
    build_system_kv,
    model_path,
    provenance,
    serving,
    step,
    write_csv,
)

SHOWN = 6  # answers printed in full
# What rounding alone makes of this bf16 model's log-probabilities, should the control show none.
ROUNDING = 0.03  # nats
# `vllm bench serve` says nothing new about the third server: it may cost this many seconds there.
BENCH_LIMIT = 60.0
# Of every server, and of the build of its system KV. Compiling takes a minute or more per server on
# two cores and leaves attention as it is.
ENGINE_FLAGS = ["--enforce-eager", "--max-model-len", "8192"]
SYSTEM_KV_FLAG = "--additional-config.relay.system_kv"


@dataclass(frozen=True)
class Run:
    """What one server did.

    Attributes:
        label: its name in tables.
        first_ttft: seconds to the first token of the first request, see `chat.first_ttft`.
        answers: to the questions, in order. again: those of the control, see `run_server`.
        bench: result of `vllm bench serve`, None if it was left out. bench_seconds: its whole time.
        counters: what relay counted. sharing: the line that says who shares what.
        system_kv: what the log says of the system KV; empty without one.
    """

    label: str
    first_ttft: float
    answers: list[Answer]
    again: list[Answer]
    bench: dict[str, Any] | None
    bench_seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    sharing: str | None = None
    system_kv: tuple[str, ...] = ()


def labels(backends: list[str]) -> list[str]:
    """ "relay" or "stock" per backend, numbered where a name comes twice."""
    names = ["relay" if name.lower() == "relay" else "stock" for name in backends]
    return [
        name if names.index(name) == i else f"{name}-{names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def relay_counters(log: str) -> dict[str, int]:
    """The counters of the last `relay: steps=… kv_bytes_not_read=…` line; {} without one."""
    lines = re.findall(r"relay: (.*\bsteps=\d.*)", log)
    return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", lines[-1])} if lines else {}


def sharing_line(log: str) -> str | None:
    """The line that says who shares what; None if sharing never started."""
    found = re.search(r"\d[\d,]* requests share [\d,]+ tokens in .*", log)
    return found[0].strip() if found else None


def system_kv_lines(log: str) -> tuple[str, ...]:
    """What the log says of system KVs: the tokens pinned of each, without its path; the rate."""
    pattern = r"relay: (system KV .+? tokens pinned in \d+ blocks?|wrote \d+ system KV.* GB/s)"
    return tuple(re.findall(pattern, log))


def human_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def run_all(args: argparse.Namespace, folder: Path, console: Console) -> list[Run]:
    """Run every server in turn: one per backend, then the second again with a system KV."""
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    system = licence_prompt(tokenizer, args.prompt_tokens)
    runs: list[Run] = []
    for backend, label in zip(args.backends, labels(args.backends), strict=True):
        console.print(f"\n[bold]{label}[/]  {shown_command(backend)}", highlight=False)
        runs.append(run_server(backend, label, system, args, folder, console, control=not runs))
    if args.no_system_kv:
        return runs
    backend, label = args.backends[1], f"{runs[1].label}+kv"
    prompt = folder / "licence.txt"
    prompt.write_text(system)
    name = prompt.with_suffix(".relay").name
    console.print(f"\n[bold]{label}[/]  {shown_command(backend, name)}", highlight=False)
    with step(console, "build system KV") as report:
        env = engine_env(args)
        file = build_system_kv(model_path(), prompt, ENGINE_FLAGS, env=env, report=report)
    bench = runs[1].bench_seconds <= BENCH_LIMIT
    runs.append(
        run_server(backend, label, system, args, folder, console, system_kv=file, bench=bench)
    )
    return runs


def engine_env(args: argparse.Namespace) -> dict[str, str]:
    """Environment of every engine, so that all compute with the same memory and cores."""
    # vLLM leaves one more core idle beside a KV connector, which loads the system KV; where there
    # are two cores it then uses both. The other servers have none.
    reserved = os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": reserved,
    }


def shown_command(backend: str, system_kv: str | None = None) -> str:
    """The part of a server's command line that matters."""
    command = f"vllm serve --attention-backend {backend}"
    return f"{command} {SYSTEM_KV_FLAG} {system_kv}" if system_kv else command


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
    """Serve with `backend`, ask, measure, stop; the counters appear in the log as it stops.

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
    options = [*flags.split(), *ENGINE_FLAGS]
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
                measured = bench_serve(server, model, bench_options(args), report)
        seconds = time.monotonic() - started
    text = log.read_text(errors="replace")
    found = system_kv_lines(text)
    if system_kv is not None and not found:
        raise RuntimeError(f"{label} was to load a system KV, its log does not say so: {log}")
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


def show_answers(console: Console, asked: list[str], runs: list[Run]) -> None:
    """The first answers of two servers side by side; how many of a third are the second's."""
    first, second, *more = runs
    parted = agreement(first.answers, second.answers).partings
    table = Table(title="The same questions", show_lines=True, expand=True)
    table.add_column("question", ratio=2)
    table.add_column(first.label, ratio=4)
    table.add_column(second.label, ratio=4)
    rows = list(enumerate(zip(asked, first.answers, second.answers, strict=True)))
    for i, (question, a, b) in rows[:SHOWN]:
        other = Text(b.text) if i in parted else Text("(the same, token for token)", style="dim")
        table.add_row(question, Text(a.text), other)
    console.print(table)
    for run in more:
        same = agreement(second.answers, run.answers)
        console.print(
            f"{run.label}: {same.identical} of {same.answers} answers are the same as "
            f"{second.label}'s, token for token",
            highlight=False,
        )


def show_agreement(console: Console, runs: list[Run]) -> bool:
    """How many answers agree with the first server's, where the others part; whether all other
    servers are as close to it as may be."""
    first, *others = runs
    control = agreement(first.answers, first.again)
    found = {run.label: agreement(first.answers, run.answers) for run in others}
    table = Table(title=f"Agreement with the {control.answers} answers of {first.label}")
    for heading in ("", "identical answers", "mean log-prob difference", "largest"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, other in {f"{first.label}, asked again, half at a time": control, **found}.items():
        count = f"{other.identical} of {other.answers}"
        table.add_row(name, count, f"{other.mean:.4f} nats", f"{other.largest:.4f} nats")
    console.print(table)
    for run in others:
        pairs = list(zip(first.answers, run.answers, strict=True))
        leads = {i: lead(*pairs[i], at) for i, at in found[run.label].partings.items()}
        places = [
            f"{i + 1}: {at + 1} ({leads[i]:.3f})" for i, at in found[run.label].partings.items()
        ]
        if places:
            console.print(
                f"Where {run.label} parts from {first.label}, as question: token (how far the best "
                f"token led there, nats)\n  {', '.join(places)}",
                highlight=False,
            )
    if any(other.partings for other in found.values()):
        console.print(
            "[dim]Small bf16 models often have two tokens that nearly tie; another order of sums "
            "flips the choice.[/]",
            highlight=False,
        )
    allowed = 2 * max(control.mean, ROUNDING)
    for label, other in found.items():
        verdict = "[green]passed" if other.mean <= allowed else "[red]failed"
        console.print(
            f"{verdict}:[/] {label} differs from {first.label} by {other.mean:.4f} nats; "
            f"allowed are {allowed:.4f} (twice what rounding does)",
            highlight=False,
        )
    return all(other.mean <= allowed for other in found.values())


def speed_table(runs: list[Run]) -> Table:
    """One column per server, then one with the ratio to the first per other server."""
    first, *others = runs
    table = Table(title="Speed: the first request, then vllm bench serve with one shared prefix")
    table.add_column("metric")
    for heading in (*(r.label for r in runs), *(f"{r.label}\n/ {first.label}" for r in others)):
        # The metric may wrap in a narrow terminal, numbers may not.
        table.add_column(heading, justify="right", no_wrap=True)
    title = "TTFT of the first request after start\n(ms, lower is better)"
    rows: dict[str, list[float | None]] = {title: [1000 * run.first_ttft for run in runs]}
    for title, key in (
        ("TTFT, median (ms, lower is better)", "median_ttft_ms"),
        ("TPOT, median (ms, lower is better)", "median_tpot_ms"),
        ("throughput (tokens/s, higher is better)", "output_throughput"),
    ):
        rows[title] = [run.bench[key] if run.bench else None for run in runs]
    for title, (reference, *values) in rows.items():
        cells = ["-" if x is None else f"{x:,.1f}" for x in (reference, *values)]
        ratios = ["-" if not reference or x is None else f"{x / reference:.2f} x" for x in values]
        table.add_row(title, *cells, *ratios)
    # Without its bench part a server's count is not comparable.
    counts = [run.counters.get("kv_bytes_not_read", 0) if run.bench else None for run in runs]
    skipped = ["-" if count is None else human_bytes(count) for count in counts]
    table.add_row("KV bytes not read (chat and bench)", *skipped, *("" for _ in others))
    return table


def show_numbers(console: Console, runs: list[Run]) -> None:
    """The table of speed, and what the servers logged about it."""
    console.print(speed_table(runs))
    console.print(
        "[dim]The first request is measured once per server, after a short one without the system "
        "prompt.[/]",
        highlight=False,
    )
    for run in runs:
        if run.system_kv:
            there = "no gain there" if run.bench else "left out"
            why = f"its file is the chats' system prompt; vllm bench serve sends another: {there}"
            for line in (why, *run.system_kv):
                console.print(f"[dim]{run.label}: {line}[/]", highlight=False)
    for run in runs:
        if run.sharing:
            console.print(f"{run.label}: {run.sharing}", highlight=False)
        if run.counters.get("steps_relayed") == 0:
            console.print(f"[yellow]{run.label}: sharing did not pay in any step of this load.[/]")
        if run.counters:
            counts = ", ".join(f"{k} {v:,}" for k, v in run.counters.items())
            console.print(f"[dim]{run.label}: {counts}[/]", highlight=False)


def csv_rows(runs: list[Run], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per server: the load, the first request, the medians, the agreement with the first
    (of the first: with itself, asked again), the counters."""
    rows = []
    for run in runs:
        bench = run.bench or {}
        close = agreement(runs[0].answers, run.again if run is runs[0] else run.answers)
        rows.append(
            {
                "backend": run.label,
                "requests": args.requests,
                "prompt_tokens": args.prompt_tokens,
                "first_ttft_ms": f"{1000 * run.first_ttft:.3f}",
                **{
                    column: f"{bench[key]:.3f}" if bench else ""
                    for column, key in (
                        ("ttft_median_ms", "median_ttft_ms"),
                        ("tpot_median_ms", "median_tpot_ms"),
                        ("output_tokens_per_s", "output_throughput"),
                    )
                },
                "answers_identical": close.identical,
                "mean_logprob_difference": f"{close.mean:.6f}",
                **{f"relay_{name}": count for name, count in run.counters.items()},
            }
        )
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", nargs=2, default=["CPU_ATTN", "relay"], metavar="NAME")
    parser.add_argument(
        "--no-system-kv", action="store_true", help="leave the server with a system KV out"
    )
    parser.add_argument("--requests", type=int, default=24, help="concurrent requests")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="length of the prefix")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of one chat answer")
    parser.add_argument("--kv-gib", type=int, default=2, help="KV cache of a server, GiB")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="folder for logs and results")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="tiny numbers: does it run at all?")
    args = parser.parse_args(argv)
    if args.quick:
        args.requests, args.prompt_tokens, args.max_tokens = 8, 1500, 8
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
        f"{'two' if args.no_system_kv else 'three'} servers in turn.\nLogs and results: {folder}",
        highlight=False,
    )
    try:
        runs = run_all(args, folder, console)
    except (RuntimeError, OSError, openai.OpenAIError) as error:
        console.print(f"\n[red]failed:[/] {type(error).__name__}", highlight=False)
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        console.print(f"Logs: {folder}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print(f"\nstopped; logs: {folder}", highlight=False)
        return 130
    for run in runs:
        saved = [asdict(answer) for answer in run.answers]
        (folder / f"{run.label}-answers.json").write_text(json.dumps(saved, indent=1))
    console.print()
    show_answers(console, questions(args.requests), runs)
    console.print()
    if not show_agreement(console, runs):
        console.print(f"No speed is shown for wrong answers. Logs and answers: {folder}")
        return 1
    console.print()
    show_numbers(console, runs)
    rows, prov = csv_rows(runs, args), provenance()
    written = [write_csv(folder / "demo.csv", rows, prov)]
    if args.save:
        written.append(write_csv(ROOT / "benchmarks" / "results" / "demo.csv", rows, prov))
    console.print(f"\nFinished in {time.monotonic() - started:.0f} s. Logs and results: {folder}")
    console.print("CSV: " + ", ".join(str(path) for path in written), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
