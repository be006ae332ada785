"""Time to first token with an offline system KV, and the time to load it.

    python benchmarks/suites/bench_system_kv.py --save

`first token`: time to the first token of the first request after a start of `vllm serve`, with and
without the file, in turns, under a system prompt of SmolLM2; then once more after other prompts
have gone round the whole KV cache several times. `load`: how fast a file goes into the KV cache of
a model with much KV, beside what one core does with the same bytes.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import openai
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.chat import first_ttft, licence_prompt
from benchmarks.harness.environment import HUGE_PAGES, MODEL_NAME, OFFLINE, model_dtype, model_path
from benchmarks.harness.latin_square import save_engines
from benchmarks.harness.random_model import VOCABULARY, write_random_model
from benchmarks.harness.terminal import add_eager, add_save, step
from vllm_relay.serving.commands import build_system_kv
from vllm_relay.serving.processes import Server, run, serving
from vllm_relay.system_kv.file import SystemKVFile

BLOCK = 128
MAX_MODEL_LEN = 8192
ENV = {"VLLM_CPU_KVCACHE_SPACE": "2", **HUGE_PAGES}
Row = dict[str, Any]


def evict(server: Server, rounds: float, blocks: int, report: Callable[[str], None]) -> int:
    """Send prompts that share nothing until `rounds` x the KV cache went through; the tokens."""
    rng = np.random.default_rng(0)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
    total, sent = int(rounds * blocks * BLOCK), 0
    while sent < total:
        prompts = rng.integers(300, 40_000, size=(4, 2000)).tolist()
        client.completions.create(model=MODEL_NAME, prompt=prompts, max_tokens=1)
        sent += 8000
        report(f"{sent:,} of {total:,} tokens of other prompts")
    return sent


def first_token(args: argparse.Namespace, folder: Path, console: Console) -> list[Row]:
    model = model_path()
    system = licence_prompt(Tokenizer.from_file(str(model / "tokenizer.json")), args.prompt_tokens)
    prompt = folder / "licence.txt"
    prompt.write_text(system)
    with step(console, "build system KV") as report:
        flags = ["--dtype", model_dtype(), "--max-model-len", str(MAX_MODEL_LEN)]
        flags += ["--enforce-eager"] if args.eager else []
        options = ["--system-prompt", str(prompt), *flags]
        file = build_system_kv(model, prompt.with_suffix(".relay"), options, env=ENV, report=report)
    flags += ["--served-model-name", MODEL_NAME, "--attention-backend", "relay"]
    flags += ["--disable-uvicorn-access-log", "--num-gpu-blocks-override", str(args.blocks)]
    kinds = {"without": [], "with": ["--additional-config.relay.system_kv", str(file)]}
    tokens = SystemKVFile(file).manifest.tokens
    rows: list[Row] = []
    for i in range(args.pairs):
        for kind, more in kinds.items():
            log = folder / f"{kind}-{i}.log"
            title = f"first token {kind} the file, {i + 1} of {args.pairs}"
            with (
                step(console, title) as report,
                serving(model, [*flags, *more], log, env=ENV, report=report) as server,
            ):
                row = {"what": "first token", "file": kind, "pair": i, "tokens": tokens}
                rows.append(row | {"ttft_s": round(first_ttft(server, system, report), 4)})
                if i == 0:
                    sent = evict(server, args.rounds, args.blocks, report)
                    again = round(first_ttft(server, system, report), 4)
                    what = f"after {sent / (args.blocks * BLOCK):.1f} x the KV cache"
                    rows.append({**row, "what": what, "ttft_s": again})
    return rows


LOAD = """
import sys
from vllm import LLM
if __name__ == "__main__":
    LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=16384, enforce_eager=True,
        dtype=sys.argv[3], attention_backend="relay",
        additional_config={"relay": {"system_kv": sys.argv[2]}})
"""


def load(args: argparse.Namespace, folder: Path, console: Console) -> list[Row]:
    """GB/s of the engine's own log line, and of single parts on one core."""
    model = write_random_model(folder / "model", 16, 16, 128)
    ids = np.random.default_rng(1).integers(3, VOCABULARY, size=args.load_tokens).tolist()
    (folder / "ids.json").write_text(str(ids))
    file = folder / "ids.relay"
    options = ["--enforce-eager", "--skip-tokenizer-init", "--token-ids", str(folder / "ids.json")]
    options += ["--dtype", model_dtype(), "--max-model-len", "16384"]
    (folder / "load.py").write_text(LOAD)
    command = [sys.executable, str(folder / "load.py"), str(model), str(file), model_dtype()]
    text = ""
    with step(console, "load") as report:
        report("building a file")
        build_system_kv(model, file, options, env=OFFLINE | ENV)
        for i in range(args.pairs):
            report(f"{i + 1} of {args.pairs}")
            text += run(command, folder / f"load-{i}.log", OFFLINE | ENV)
    rates = re.findall(r"KV cache: ([\d.]+) MB in [\d.]+ s, ([\d.]+) GB/s", text)
    rows: list[Row] = [
        {"what": "load, checksums included", "pair": i, "mb": mb, "gb_per_s": rate}
        for i, (mb, rate) in enumerate(rates)
    ]
    for what, work in parts(file).items():
        for i in range(args.pairs):
            started = time.monotonic()
            count = work()
            rate = count / 1e9 / (time.monotonic() - started)
            rows.append(
                {"what": what, "pair": i, "mb": round(count / 1e6, 1), "gb_per_s": round(rate, 2)}
            )
    return rows


def parts(file: Path) -> dict[str, Callable[[], int]]:
    """Single-core parts of a load: name -> function that returns the bytes it handled."""
    torch.set_num_threads(1)
    raw = file.read_bytes()
    source = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    target = torch.empty_like(source)
    buffer = bytearray(len(raw))

    def read() -> int:
        with file.open("rb", buffering=0) as opened:
            return opened.readinto(buffer) or 0

    def checksum() -> int:
        blake3.blake3(raw).digest()
        return len(raw)

    def copy() -> int:
        target.copy_(source)
        return len(raw)

    return {
        "part: read from the page cache": read,
        "part: BLAKE3, one thread": checksum,
        "part: copy, one thread": copy,
    }


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title="Medians")
    table.add_column("measured")
    table.add_column("value", justify="right")
    for what in dict.fromkeys(row["what"] for row in rows):
        of = [row for row in rows if row["what"] == what]
        if "ttft_s" in of[0]:
            medians = {
                kind: statistics.median(row["ttft_s"] for row in of if row["file"] == kind)
                for kind in ("without", "with")
            }
            for kind, median in medians.items():
                table.add_row(f"TTFT, {what}, {kind} the file", f"{median:.3f} s")
            table.add_row(f"TTFT, {what}, ratio", f"{medians['with'] / medians['without']:.3f}")
        else:
            median = statistics.median(float(row["gb_per_s"]) for row in of)
            table.add_row(f"{what} ({of[0]['mb']} MB)", f"{median:.2f} GB/s")
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="repetitions (default: 3)")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of the system prompt")
    parser.add_argument("--blocks", type=int, default=100, help="of 128 tokens, the KV cache")
    parser.add_argument("--rounds", type=float, default=5.0, help="x the KV cache in other prompts")
    parser.add_argument("--load-tokens", type=int, default=8192, help="of the file that is loaded")
    add_eager(parser)
    add_save(parser)
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = first_token(args, folder, console) + load(args, folder, console)
    show(console, rows)
    if args.save:
        save_engines(console, "system_kv", rows, args.eager)
    return 0


if __name__ == "__main__":
    sys.exit(main())
