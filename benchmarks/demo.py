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
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.chat import Agreement, Answer, agreement, ask, lead, licence_prompt, questions
from benchmarks.common import (
    MODEL_NAME,
    ROOT,
    bench_serve,
    model_path,
    provenance,
    serving,
    step,
    write_csv,
)

SHOWN = 6  # answers printed in full
# What rounding alone makes of this bf16 model's log-probabilities, should the control show none.
ROUNDING = 0.03  # nats


@dataclass(frozen=True)
class Run:
    """What one backend did; `again` holds the answers of the control, see `run_backend`."""

    label: str
    answers: list[Answer]
    again: list[Answer]
    bench: dict[str, Any]
    counters: dict[str, int]
    sharing: str | None


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


def human_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def run_backend(
    backend: str,
    label: str,
    args: argparse.Namespace,
    folder: Path,
    console: Console,
    *,
    control: bool,
) -> Run:
    """Serve with `backend`, ask, measure, stop; the counters appear in the log as it stops.

    With `control` it answers twice, the second time in batches of half the size: how far it then
    is from itself is the measure for how far another backend may be from it.
    """
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
    rounds = [("chat", args.requests)]
    if control:
        rounds.append(("chat again, half at a time", max(1, args.requests // 2)))
    console.print(f"\n[bold]{label}[/]  vllm serve --attention-backend {backend}", highlight=False)
    with ExitStack() as stack:
        with step(console, "server") as report:
            server = stack.enter_context(serving(model, flags.split(), log, env=env, report=report))
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
        with step(console, "vllm bench serve") as report:
            bench = bench_serve(server, model, bench_options(args), report)
    text = log.read_text(errors="replace")
    return Run(label, sets[0], sets[-1], bench, relay_counters(text), sharing_line(text))


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
    """The first answers side by side."""
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


def show_agreement(console: Console, control: Agreement, first: Run, second: Run) -> bool:
    """How many answers agree, where the others part; whether the second is as close as may be."""
    other = agreement(first.answers, second.answers)
    table = Table(title=f"Agreement with the {other.answers} answers of {first.label}")
    for heading in ("", "identical answers", "mean log-prob difference", "largest"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = {f"{first.label}, asked again, half at a time": control, second.label: other}
    for name, found in rows.items():
        count = f"{found.identical} of {found.answers}"
        table.add_row(name, count, f"{found.mean:.4f} nats", f"{found.largest:.4f} nats")
    console.print(table)
    if other.partings:
        pairs = list(zip(first.answers, second.answers, strict=True))
        leads = {i: lead(*pairs[i], at) for i, at in other.partings.items()}
        places = [f"{i + 1}: {at + 1} ({leads[i]:.3f})" for i, at in other.partings.items()]
        console.print(
            f"Where {second.label} parts from {first.label}, as question: token (how far the best "
            f"token led there, nats)\n  {', '.join(places)}\n[dim]Small bf16 models often have two "
            "tokens that nearly tie; another order of summation flips the choice.[/]",
            highlight=False,
        )
    allowed = 2 * max(control.mean, ROUNDING)
    close: bool = other.mean <= allowed
    verdict = "[green]passed" if close else "[red]failed"
    console.print(
        f"{verdict}:[/] {second.label} differs from {first.label} by {other.mean:.4f} nats, "
        f"at most {allowed:.4f} (twice what rounding does) are allowed",
        highlight=False,
    )
    return close


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
        if run.counters.get("steps_relayed") == 0:
            console.print(f"[yellow]{run.label}: sharing did not pay in any step of this load.[/]")
        if run.counters:
            counts = ", ".join(f"{k} {v:,}" for k, v in run.counters.items())
            console.print(f"[dim]{run.label}: {counts}[/]", highlight=False)


def csv_rows(runs: list[Run], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per backend: the load, the medians, the agreement with the first (of the first: with
    itself, asked again), the counters."""
    rows = []
    for run in runs:
        close = agreement(runs[0].answers, run.again if run is runs[0] else run.answers)
        rows.append(
            {
                "backend": run.label,
                "requests": args.requests,
                "prompt_tokens": args.prompt_tokens,
                "ttft_median_ms": f"{run.bench['median_ttft_ms']:.3f}",
                "tpot_median_ms": f"{run.bench['median_tpot_ms']:.3f}",
                "output_tokens_per_s": f"{run.bench['output_throughput']:.3f}",
                "answers_identical": close.identical,
                "mean_logprob_difference": f"{close.mean:.6f}",
                **{f"relay_{name}": count for name, count in run.counters.items()},
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
    started, names = time.monotonic(), labels(args.backends)
    console.print(
        f"{args.requests} concurrent chats, one system prompt of {args.prompt_tokens:,} tokens, "
        f"two servers in turn.\nLogs and results: {folder}",
        highlight=False,
    )
    try:
        runs = [
            run_backend(backend, label, args, folder, console, control=i == 0)
            for i, (backend, label) in enumerate(zip(args.backends, names, strict=True))
        ]
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
    show_answers(console, questions(args.requests), *runs)
    console.print()
    if not show_agreement(console, agreement(runs[0].answers, runs[0].again), *runs):
        console.print(f"No speed is shown for wrong answers. Logs and answers: {folder}")
        return 1
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
