"""llama.cpp's server beside vLLM and relay on a CPU, on the same prompts.

    make llama && python benchmarks/suites/bench_llama_cpp.py --save

The servers have the same weights in bf16. Chats under one system prompt arrive at once, greedy,
with `vllm bench serve` as the client; new questions in every round, the system prompt in every
server's cache, and in every slot of llama.cpp. First llama.cpp's settings are tried one after
another, on the most threads. The fastest serves the grid beside vLLM and relay: all servers are up,
one at a time is under load.
"""

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import latin_square
from benchmarks.harness.chat import asked, licence_prompt
from benchmarks.harness.environment import HUGE_PAGES, kv_gib, model_path
from benchmarks.harness.llama_cpp import FOLDER, SETTINGS, LlamaServer
from benchmarks.harness.result_csv import Row
from benchmarks.harness.terminal import add_eager, add_save, at_least, make_console, step
from benchmarks.report.llama_cpp_figures import HEADINGS, grid_lines
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving.agreement import WrongAnswers, check
from vllm_relay.serving.comparison import interleaved, render
from vllm_relay.serving.processes import Report, Server, kept_logs, serving
from vllm_relay.serving.systems import REFERENCE, SYSTEMS

LLAMA = "llama.cpp"
VLLM = (REFERENCE, "relay")
# Tokens of a chat beside its system prompt and its answer, at most.
OWN = 96
# Load by which llama.cpp's settings are chosen: shared tokens, requests.
TRIED = (1024, 8)
Ask = Callable[[int, int, int], list[str]]


def client(server: Server, prompts: Sequence[str], tokens: int) -> dict[str, Any]:
    """One run of `vllm bench serve`, in this process: its start takes longer than most loads.

    Raises:
        RuntimeError: a request failed.
    """
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    path = server.log.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = {
        "base-url": server.url,
        "model": server.name,
        "dataset-name": "custom",
        "dataset-path": path,
        "custom-output-len": tokens,
        "num-prompts": len(prompts),
        "temperature": 0,
        "percentile-metrics": "ttft,tpot",
        "extra-body": json.dumps({"add_special_tokens": False}),  # the template has added them
    }
    flags = ["--skip-chat-template", "--ignore-eos", "--disable-tqdm", "--save-detailed"]
    flags += [f"--{name}={value}" for name, value in options.items()]
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with server.log.with_suffix(".client.log").open("a") as log, redirect_stdout(log):
        found: dict[str, Any] = main(parser.parse_args(flags))
    if found["failed"]:
        why = next(error for error in found["errors"] if error).strip().splitlines()[-1]
        raise RuntimeError(f"{server.log.stem}: {found['failed']} requests failed: {why}")
    return found


def timed(
    servers: Mapping[str, Server],
    ask: Ask,
    load: tuple[int, int],
    args: argparse.Namespace,
    report: Report,
    reference: dict[int, list[str]] | None = None,
) -> list[Row]:
    """A row per system and round of one load; round 0 fills the caches.

    Args:
        reference: answers by round; those of the first server where there are none.

    Raises:
        WrongAnswers: most of a server's answers begin with another word.
    """
    rows: list[Row] = []
    shared, requests = load
    reference = {} if reference is None else reference
    alike: Counter[str] = Counter()
    texts = [prompt for number in (0, 1) for prompt in ask(shared, requests, number)]
    shared_text = os.path.commonprefix(texts)  # noqa: RUF071 (letter by letter)
    for server in servers.values():
        if isinstance(server, LlamaServer):
            report(f"{shared:,} shared tokens into {server.slots} slots")
            server.fill(shared_text)
    for number in range(args.repeats + 1):
        prompts, found = ask(shared, requests, number), {}
        for key in interleaved(list(servers), number):
            report(f"{requests} requests, {shared:,} shared tokens, round {number}: {key}")
            found[key] = client(servers[key], prompts, args.tokens)
        texts = reference.setdefault(number, found[next(iter(servers))]["generated_texts"])
        for key in servers:
            pairs = zip(found[key]["generated_texts"], texts, strict=True)
            begin_alike = sum(a.split()[:1] == b.split()[:1] for a, b in pairs)
            alike[key] += begin_alike
            row = {
                "shared_tokens": shared,
                "requests": requests,
                "tokens": args.tokens,
                "round": number,
                "system": key,
                "prompt_tokens": sum(found[key]["input_lens"]),
                "begin_alike": begin_alike,
                "tokens_per_s": round(found[key]["output_throughput"], 3),
                "ttft_p50_s": round(found[key]["median_ttft_ms"] / 1e3, 4),
                "ttft_p99_s": round(found[key]["p99_ttft_ms"] / 1e3, 4),
                "tpot_p50_s": round(found[key]["median_tpot_ms"] / 1e3, 5),
            }
            rows += [row] if number else []
    asked = requests * (args.repeats + 1)
    for key in servers:
        if 2 * alike[key] < asked:
            raise WrongAnswers(f"{key}: {alike[key]} of {asked} answers begin as they should")
    return rows


def try_settings(
    ask: Ask, cores: Sequence[int], args: argparse.Namespace, folder: Path, report: Report
) -> list[Row]:
    """Rows of llama.cpp alone with each of its settings."""
    rows: list[Row] = []
    reference: dict[int, list[str]] = {}
    for number, (name, flags) in enumerate(SETTINGS.items()):
        log = folder / f"settings-{len(cores)}-{number}.log"
        with ExitStack() as stack:
            tokens = TRIED[0] + OWN + args.tokens
            server = LlamaServer(args.model, TRIED[1], tokens, cores, flags, log)
            stack.callback(server.stop)
            server.wait_ready(lambda _: report(f"starting: {LLAMA}"))
            found = timed({LLAMA: server}, ask, TRIED, args, report, reference)
        rows += [{"part": "settings", "threads": len(cores), "settings": name, **x} for x in found]
    return rows


def fastest(rows: Sequence[Row]) -> str:
    """The settings with the highest median of tokens per second."""

    def median(name: str) -> float:
        return statistics.median(x["tokens_per_s"] for x in rows if x["settings"] == name)

    return max(dict.fromkeys(row["settings"] for row in rows), key=median)


def serve_grid(
    ask: Ask,
    cores: Sequence[int],
    settings: str,
    args: argparse.Namespace,
    folder: Path,
    report: Report,
) -> list[Row]:
    """Rows of vLLM, relay and llama.cpp over shared length and requests."""
    threads = len(cores)
    most, longest = max(args.requests), max(args.shared) + OWN + args.tokens
    flags = ["--max-model-len", str(longest), "--max-num-seqs", str(most)]
    flags += ["--enforce-eager"] if args.eager else []
    env = {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib()), **HUGE_PAGES}
    env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    rows: list[Row] = []
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for key in VLLM:
            log = folder / f"{key}-{threads}.log"
            own = [*flags, *SYSTEMS[key].flags()]
            report(f"starting: {key}")
            servers[key] = stack.enter_context(serving(args.model, own, log, env=env))
        log = folder / f"{LLAMA}-{threads}.log"
        servers[LLAMA] = LlamaServer(args.model, most, longest, cores, SETTINGS[settings], log)
        stack.callback(servers[LLAMA].stop)
        servers[LLAMA].wait_ready(lambda _: report(f"starting: {LLAMA}"))
        prompts = ask(max(args.shared), most, -1)
        check({key: servers[key] for key in VLLM}, prompts, report)
        for shared in args.shared:
            for requests in args.requests:
                for row in timed(servers, ask, (shared, requests), args, report):
                    of_it = settings if row["system"] == LLAMA else ""
                    rows.append({"part": "grid", "threads": threads, "settings": of_it, **row})
    return rows


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title=f"{', '.join(VLLM)}, {LLAMA} (medians of rounds)")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for line in grid_lines(rows):
        table.add_row(*line)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shared", type=at_least(1), nargs="+", default=[16, 1024, 4096])
    parser.add_argument("--requests", type=at_least(1), nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=at_least(2), default=32, help="that each request gets")
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[1, 2])
    parser.add_argument("--settings", choices=SETTINGS, help="of llama.cpp, without trying others")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    add_eager(parser)
    add_save(parser)
    args = parser.parse_args(argv)
    allowed = sorted(os.sched_getaffinity(0))
    if max(args.threads) > len(allowed):
        parser.error(f"--threads: there are {len(allowed)} cores")
    console, rows = make_console(), []
    args.model = model_path()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    plain = Tokenizer.from_file(str(args.model / "tokenizer.json"))

    def ask(shared: int, requests: int, number: int) -> list[str]:
        system = licence_prompt(plain, shared)
        return render(tokenizer, system, asked(requests, f"{number}, {requests}, {shared}"))

    try:
        with ExitStack() as stack:
            stack.enter_context(ended_in_order())
            report = stack.enter_context(step(console, "servers"))
            folder = stack.enter_context(kept_logs("vllm-relay-llama-"))
            settings = args.settings
            if settings is None:
                rows = try_settings(ask, allowed[: max(args.threads)], args, folder, report)
                settings = fastest(rows)
            for threads in args.threads:
                rows += serve_grid(ask, allowed[:threads], settings, args, folder, report)
    except (RuntimeError, FileNotFoundError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    of_all = {"model": args.model.name, "llama_cpp": FOLDER.name, "kv_gib": kv_gib()}
    rows = [{**of_all, **row} for row in rows]
    show(console, rows)
    if args.save:
        latin_square.save_engines(console, "llama_cpp", rows, args.eager, dtype="auto")
    return 0


if __name__ == "__main__":
    sys.exit(main())
