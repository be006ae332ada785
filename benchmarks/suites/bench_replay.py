"""A trace of requests replayed through real servers, with `system_kv.learn` and without.

    python benchmarks/suites/bench_replay.py conversation_trace.jsonl --save

The trace names the blocks of each prompt (``hash_ids``, one JSON object per line, as Mooncake's
traces do). A block becomes one KV block of random tokens here, whatever it had, so that a small
model on a CPU keeps up; a KV cache of a share of the distinct blocks holds them. One server after
the other gets the requests in the order of the trace, one at a time, and answers with one token.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import httpx
import numpy as np
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import HUGE_PAGES, kv_gib, model_dtype
from benchmarks.harness.latin_square import save_engines
from benchmarks.harness.random_model import VOCABULARY, write_random_model
from benchmarks.harness.terminal import add_save, at_least, make_console, step
from benchmarks.suites.bench_learn import WAYS
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving.processes import Server, kept_logs, serving

HEADS = (2, 1, 32)
# The shortest KV block of the CPU engine.
BLOCK = 32


def blocks_of(trace: Path) -> Iterator[list[int]]:
    """The names of the blocks of each request. Raises ValueError that names the line."""
    with trace.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield [int(x) for x in json.loads(line)["hash_ids"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{trace}, line {number}: no hash_ids: {error!r}") from None


def prompt_of(blocks: list[int], number: int) -> list[int]:
    """Tokens of a request's blocks and one of its own, so that all its blocks can be cached."""
    tokens = [np.random.default_rng(x).integers(3, VOCABULARY, BLOCK) for x in blocks]
    return [*np.concatenate(tokens).tolist(), 3 + number % (VOCABULARY - 3)]


def ask(client: httpx.Client, server: Server, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds until the only token of an answer, cached tokens of the prompt, and the token."""
    asked = {"model": server.name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    asked |= {"return_token_ids": True}
    begun = time.perf_counter()
    answer = client.post(f"{server.url}/v1/completions", json=asked)
    seconds = time.perf_counter() - begun
    answer.raise_for_status()
    found = answer.json()
    details = found["usage"]["prompt_tokens_details"] or {}
    (token,) = found["choices"][0]["token_ids"]
    return seconds, details.get("cached_tokens") or 0, token


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=at_least(1), help="the first of the trace; all without")
    parser.add_argument("--share", type=float, default=0.1, help="of distinct blocks in the cache")
    add_save(parser)
    args = parser.parse_args(argv)
    console = make_console()
    try:
        requests = list(islice(blocks_of(args.trace), args.requests))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    distinct = len({x for blocks in requests for x in blocks})
    kv_blocks = max(max(map(len, requests)) + 2, int(args.share * distinct))
    flags = ["--enforce-eager", "--skip-tokenizer-init", "--attention-backend", "relay"]
    flags += ["--dtype", model_dtype()]
    flags += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(kv_blocks)]
    flags += ["--max-model-len", str(BLOCK * max(map(len, requests)) + 2)]
    flags += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    flags += ["--max-num-seqs", "4"]
    env = {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib()), **HUGE_PAGES}
    done: dict[str, list[tuple[float, int, int]]] = {way: [] for way in WAYS}
    try:
        with ExitStack() as stack:
            stack.enter_context(ended_in_order())
            report = stack.enter_context(step(console, "servers"))
            folder = stack.enter_context(kept_logs("vllm-relay-replay-"))
            model = write_random_model(folder / "model", *HEADS)
            client = stack.enter_context(httpx.Client(timeout=300))
            for way, settings in WAYS.items():
                more = ["--additional-config", json.dumps({"relay": settings})]
                log = folder / f"{way}.log"
                with serving(model, [*flags, *more], log, env=env, report=report) as server:
                    for number, blocks in enumerate(requests):
                        done[way].append(ask(client, server, prompt_of(blocks, number)))
                        report(f"{way}, request {number + 1:,} of {len(requests):,}")
    except (RuntimeError, httpx.HTTPError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    tokens = {way: [token for _, _, token in answers] for way, answers in done.items()}
    other = sum(a != b for a, b in zip(*tokens.values(), strict=True))
    prompts = sum(BLOCK * len(blocks) for blocks in requests)
    table = Table("way", "cached tokens", "of the prompts'", "TTFT p50, ms", title=args.trace.name)
    rows = []
    for way, answers in done.items():
        cached = sum(found for _, found, _ in answers)
        ttft_s = statistics.median(seconds for seconds, _, _ in answers)
        table.add_row(way, f"{cached:,}", f"{cached / prompts:.2%}", f"{1000 * ttft_s:.1f}")
        rows.append(
            {
                "trace": args.trace.name,
                "requests": len(requests),
                "distinct_blocks": distinct,
                "kv_blocks": kv_blocks,
                "block": BLOCK,
                "way": way,
                "prompt_tokens": prompts,
                "cached_tokens": cached,
                "ttft_p50_s": round(ttft_s, 5),
                "other_tokens": other,
            }
        )
    console.print(table)
    console.print(f"answers with another token: {other:,} of {len(requests):,}")
    if args.save:
        save_engines(console, "replay", rows, eager=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
