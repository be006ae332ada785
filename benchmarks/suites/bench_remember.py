"""A server that remembers: time to first token after a restart, and decoding while it saves.

    python benchmarks/suites/bench_remember.py --save

`first token`: SmolLM2 under ten prompts that nobody named beforehand. A server meets them with an
empty folder, is ended by SIGTERM, or by SIGKILL after `vllm-relay save`, and is started again; then
a second server starts from the same folder. `decode`: time per output token of requests under
`vllm bench serve`, with a round of saving meanwhile and without, interleaved.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import HUGE_PAGES, model_dtype, model_path
from benchmarks.harness.latin_square import save_engines
from benchmarks.harness.terminal import add_save, at_least, make_console, step
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving.commands import bench_serve
from vllm_relay.serving.comparison import interleaved
from vllm_relay.serving.processes import Report, Server, beside_python, kept_logs, run, serving

Row = dict[str, Any]
BLOCK = 128
# Requests under a prompt before it is hot, and tokens of each of their own.
TIMES, OWN = 4, 16
ENDS = ("SIGTERM", "SIGKILL")


def prompts_of(args: argparse.Namespace, count: int, seed: int) -> list[list[int]]:
    """Prompts of whole blocks, of tokens of SmolLM2's vocabulary."""
    shape = count, args.prompt_tokens // BLOCK * BLOCK
    found: list[list[int]] = np.random.default_rng(seed).integers(300, 40_000, shape).tolist()
    return found


def asked(prompt: list[int], number: int) -> list[int]:
    """A request under a prompt: its tokens and some of its own."""
    return prompt + np.random.default_rng(number).integers(300, 40_000, OWN).tolist()


class Remembering:
    """Requests to a server that remembers; ``start_s``: seconds until it was healthy."""

    def __init__(self, server: Server, start_s: float) -> None:
        self.server, self.start_s = server, round(start_s, 2)
        self._client = httpx.Client(timeout=600)

    def first_token(self, prompt: list[int]) -> Row:
        """Seconds until the first token, cached tokens, the token and its log-probability."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 0}
        begun = time.perf_counter()
        answer = self._post(body)
        seconds = time.perf_counter() - begun
        details = answer["usage"]["prompt_tokens_details"] or {}
        found = answer["choices"][0]["logprobs"]
        return {
            "cached_tokens": details.get("cached_tokens") or 0,
            "ttft_s": round(seconds, 4),
            "token": found["tokens"][0],
            "logprob": round(found["token_logprobs"][0], 4),
        }

    def save(self) -> Row:
        """Seconds of a round of saving, and what the server said."""
        begun = time.perf_counter()
        command = {"relay": {"save": True}}
        answer = self._post({"prompt": [0], "max_tokens": 1, "kv_transfer_params": command})
        found = answer["kv_transfer_params"]["relay"]
        return {"save_s": round(time.perf_counter() - begun, 1), "error": found.get("error", "")}

    def _post(self, body: Row) -> Any:
        body |= {"model": self.server.name, "return_tokens_as_token_ids": True}
        answer = self._client.post(f"{self.server.url}/v1/completions", json=body)
        answer.raise_for_status()
        return answer.json()


@contextmanager
def remembering(
    folder: Path, kept: Path, blocks: int, name: str, report: Report
) -> Iterator[Remembering]:
    """A server of SmolLM2 that remembers in ``kept``, with this many blocks of KV cache."""
    settings = {"system_kv": {"remember": str(kept), "pins": True}}
    flags = ["--enforce-eager", "--attention-backend", "relay", "--shutdown-timeout", "60"]
    flags += ["--dtype", model_dtype()]
    flags += ["--additional-config", json.dumps({"relay": settings})]
    flags += ["--max-model-len", "8192", "--max-num-seqs", "32", "--block-size", str(BLOCK)]
    flags += ["--num-gpu-blocks-override", str(blocks)]
    flags += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "6", **HUGE_PAGES}
    log = folder / f"{name}.log"
    begun = time.perf_counter()
    with serving(model_path(), flags, log, env=env, report=report) as server:
        yield Remembering(server, time.perf_counter() - begun)


def first_tokens(args: argparse.Namespace, folder: Path, report: Report) -> list[Row]:
    """Rows of all prompts, cold and after each kind of end, and of a second server."""
    prompts = prompts_of(args, args.prompts, seed=0)
    # Hot prefixes may take half of the KV cache.
    blocks = 2 * args.prompts * (len(prompts[0]) // BLOCK + 1) + 64
    rows: list[Row] = []

    def ask_all(server: Remembering, start: str, end: str) -> None:
        of = {"what": "first token", "start": start, "end": end, "start_s": server.start_s}
        warm_up = server.first_token(asked([], 1))  # compares the weights
        rows.append({**of, "prompt": "none of them", "tokens": OWN, **warm_up})
        for number, prompt in enumerate(prompts):
            report(f"{start}, {end}: prompt {number + 1} of {len(prompts)}")
            found = server.first_token(asked(prompt, 0))
            rows.append({**of, "prompt": number, "tokens": len(prompt), **found})

    for end in ENDS:
        kept = folder / f"kept-{end}"
        with remembering(folder, kept, blocks, f"cold-{end}", report) as server:
            ask_all(server, "empty folder", end)
            for number in range(1, TIMES):
                for prompt in prompts:
                    server.first_token(asked(prompt, number))
            if end == "SIGKILL":
                run(
                    beside_python("vllm-relay", "save", "--url", server.server.url),
                    folder / "save.log",
                )
                server.server.kill()
            else:
                server.server.stop(signal.SIGTERM)
        with remembering(folder, kept, blocks, f"warm-{end}", report) as server:
            ask_all(server, "again", end)
            if end == ENDS[0]:
                with remembering(folder, kept, blocks, "second", report) as second:
                    ask_all(second, "second server", end)
    return rows


def decode(args: argparse.Namespace, folder: Path, report: Report) -> list[Row]:
    """Rows of all windows of decoding, with a round of saving and without."""
    kept = folder / "kept"
    per_token = 46_080 if model_dtype() == "float32" else 23_040  # bytes of SmolLM2's KV
    tokens = args.prompt_tokens // BLOCK * BLOCK
    count = -(-int(args.gb * 1e9) // (per_token * tokens))
    blocks = 2 * count * (tokens // BLOCK + 1) + 32 * (args.generate // BLOCK + 2)
    prompts = prompts_of(args, count, seed=1)
    rows: list[Row] = []
    with remembering(folder, kept, blocks, "decode", report) as server:
        for times in range(TIMES):
            for number, prompt in enumerate(prompts):
                report(f"request {times * count + number + 1} of {TIMES * count} under hot prompts")
                server.first_token(asked(prompt, times))
        with ThreadPoolExecutor(1) as pool:
            for pair in range(args.pairs):
                for way in interleaved(["saving", "without"], pair):
                    report(f"{way}, pair {pair + 1} of {args.pairs}")
                    # No round of its own follows within minutes.
                    if (error := server.save()["error"]) or not list(kept.glob("*.relay")):
                        raise RuntimeError(f"nothing was saved: {error}")
                    for path in kept.glob("*.relay") if way == "saving" else ():
                        path.unlink()
                    before = set(kept.iterdir())
                    saved = pool.submit(_save_soon, server) if way == "saving" else None
                    options = {
                        "dataset-name": "random",
                        "random-input-len": OWN,
                        "random-output-len": args.generate,
                        "num-prompts": args.requests,
                        "num-warmups": 0,
                        "seed": pair,
                        "percentile-metrics": "tpot,itl",
                        "metric-percentiles": "99",
                    }
                    measured = bench_serve(server.server, options)
                    row = {"what": "decode", "way": way, "pair": pair, "requests": args.requests}
                    for name in ("mean_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "p99_itl_ms"):
                        row[name] = round(measured[name], 3)
                    row["window_s"] = round(measured["duration"], 1)
                    row |= saved.result() if saved else {"save_s": "", "error": ""}
                    new = set(kept.glob("*.relay")) - before
                    if way == "without" and new:
                        raise RuntimeError("a round of saving began by itself")
                    row["saved_bytes"] = sum(path.stat().st_size for path in new)
                    rows.append(row)
    return rows


def _save_soon(server: Remembering) -> Row:
    """A round of saving that begins when the client's requests decode."""
    time.sleep(15)
    return server.save()


def show(console: Console, rows: list[Row]) -> None:
    """Print medians of both parts."""
    table = Table("start", "end", "prompts that hit", "TTFT p50, s", "of cold", "largest of cold")
    cold = {(row["end"], row["prompt"]): row for row in rows if row.get("start") == "empty folder"}
    for start, end in dict.fromkeys((x["start"], x["end"]) for x in rows if "start" in x):
        of = [x for x in rows if (x.get("start"), x.get("end")) == (start, end)]
        of = [x for x in of if x["prompt"] != "none of them"]
        ratios = [x["ttft_s"] / cold[end, x["prompt"]]["ttft_s"] for x in of]
        hits = sum(x["cached_tokens"] == x["tokens"] for x in of)
        median = statistics.median(x["ttft_s"] for x in of)
        of_cold = f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}"
        table.add_row(start, end, f"{hits} of {len(of)}", f"{median:.3f}", *of_cold)
    if cold:
        console.print(table)
    table = Table("pair", "TPOT p99, ms, saving", "without", "ratio", "GB saved", "in s")
    decoded: dict[int, dict[str, Row]] = {}
    for row in rows:
        if row["what"] == "decode":
            decoded.setdefault(row["pair"], {})[row["way"]] = row
    for pair, of_pair in decoded.items():
        saving, without = of_pair["saving"], of_pair["without"]
        values = saving["p99_tpot_ms"], without["p99_tpot_ms"]
        cells = [f"{x:.2f}" for x in values] + [f"{values[0] / values[1]:.4f}"]
        table.add_row(
            str(pair), *cells, f"{saving['saved_bytes'] / 1e9:.2f}", str(saving["save_s"])
        )
    if decoded:
        console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompts", type=at_least(1), default=10)
    parser.add_argument("--prompt-tokens", type=at_least(BLOCK), default=4096)
    parser.add_argument("--gb", type=float, default=2.0, help="GB that a round saves")
    parser.add_argument("--requests", type=at_least(1), default=16, help="that decode meanwhile")
    parser.add_argument("--generate", type=at_least(2), default=1024, help="tokens of each")
    parser.add_argument("--pairs", type=at_least(1), default=3)
    add_save(parser)
    args = parser.parse_args(argv)
    console = make_console()
    rows: list[Row] = []
    try:
        with ExitStack() as stack:
            stack.enter_context(ended_in_order())
            folder = stack.enter_context(kept_logs("vllm-relay-remember-"))
            for part in args.parts:
                with step(console, part) as report:
                    rows += PARTS[part](args, folder, report)
    except (RuntimeError, OSError, httpx.HTTPError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    show(console, rows)
    if args.save:
        save_engines(console, "remember", rows, eager=True)
    return 0


PARTS = {"first-token": first_tokens, "decode": decode}

if __name__ == "__main__":
    sys.exit(main())
