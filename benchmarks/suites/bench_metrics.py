"""Time that relay's metrics take: decode steps with and without them, turn by turn in one engine.

    python benchmarks/suites/bench_metrics.py --save

With them each step is counted, its groups are kept for ``/metrics``, and the counters are asked for
all the while, as by a Prometheus that scrapes every ``--scrape`` seconds. Without them nothing is
counted and nobody asks. Windows of a few steps are ordered at random within each pair.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.environment import HUGE_PAGES, OFFLINE, importable
from benchmarks.harness.random_model import VOCABULARY, write_random_model
from benchmarks.harness.result_csv import save
from benchmarks.harness.terminal import add_heads, add_save, at_least, make_console, step

# Steps until all requests decode and segments are packed.
WARM_UP = 24


class MetricsWorker:
    """vLLM's ``worker_extension_cls``."""

    def count(self, on: bool) -> int:
        """Let steps be counted or not; returns the steps counted so far."""
        from vllm_relay import metrics
        from vllm_relay.backend.cpu import RelayMetadataBuilder as Builder

        if not hasattr(self, "_counting"):
            self._counting = Builder._count
        Builder._count = self._counting if on else lambda *args: None  # type: ignore[method-assign]
        return int(metrics.counters()["steps"])


def measure(llm: Any, shared: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step with and without metrics, and the overhead, of all pairs."""
    from prometheus_client import REGISTRY, generate_latest
    from vllm import SamplingParams

    rng = np.random.default_rng(shared)
    prefix = rng.integers(3, VOCABULARY, shared).tolist()
    engine = llm.llm_engine
    total = WARM_UP + 2 * args.pairs * (args.steps + 1)
    params = SamplingParams(max_tokens=total + WARM_UP, ignore_eos=True, detokenize=False)
    for i in range(args.requests):
        prompt = prefix + rng.integers(3, VOCABULARY, args.own).tolist()
        engine.add_request(f"{shared}-{i}", {"prompt_token_ids": prompt}, params)
    decoding: set[str] = set()
    while len(decoding) < args.requests:
        decoding |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    for _ in range(WARM_UP):
        engine.step()

    asking, ended, scrapes = Event(), Event(), 0

    def scrape() -> None:
        nonlocal scrapes
        while not ended.wait(args.scrape):
            if asking.is_set():
                scrapes += b"vllm:relay_steps_total" in generate_latest(REGISTRY)

    thread = Thread(target=scrape)
    thread.start()
    times: dict[bool, list[float]] = {True: [], False: []}
    counted = {True: 0, False: 0}
    try:
        for _ in range(args.pairs):
            for on in rng.permutation([True, False]).tolist():
                before = llm.collective_rpc("count", args=(on,))[0]
                asking.set() if on else asking.clear()
                engine.step()  # the outputs of a step that ended before the call did
                begun = time.perf_counter()
                for _ in range(args.steps):
                    engine.step()
                times[on].append((time.perf_counter() - begun) / args.steps)
                counted[on] += llm.collective_rpc("count", args=(on,))[0] - before
    finally:
        ended.set()
        thread.join()
        engine.abort_request([f"{shared}-{i}" for i in range(args.requests)])
    while engine.has_unfinished_requests():
        engine.step()
    assert counted[True] >= args.pairs * args.steps and counted[False] == 0, counted
    overheads = [with_ / without - 1 for with_, without in zip(*times.values(), strict=True)]
    low, high = bounds_of_median(overheads)
    return {
        "layers": llm.model_config.hf_config.num_hidden_layers,
        "query_heads": args.heads[0],
        "kv_heads": args.heads[1],
        "head_size": args.heads[2],
        "requests": args.requests,
        "shared_tokens": shared,
        "own_tokens": args.own,
        "pairs": args.pairs,
        "steps_per_window": args.steps,
        "scrape_s": args.scrape,
        "scrapes": scrapes,
        "with_step_ms": round(1e3 * statistics.median(times[True]), 3),
        "without_step_ms": round(1e3 * statistics.median(times[False]), 3),
        "overhead": round(statistics.median(overheads), 5),
        "overhead_low": round(low, 5),
        "overhead_high": round(high, 5),
    }


def bounds_of_median(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of a median, from order statistics."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    first = max(0, round(len(ordered) / 2 - half))
    return ordered[first], ordered[len(ordered) - 1 - first]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shared", type=int, nargs="+", default=[0, 8192])
    parser.add_argument("--own", type=int, default=64, help="tokens each request adds")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--pairs", type=at_least(3), default=100, help="of windows")
    parser.add_argument("--steps", type=at_least(1), default=2, help="decode steps of a window")
    parser.add_argument("--scrape", type=float, default=1.0, help="seconds between two scrapes")
    add_heads(parser)
    add_save(parser)
    args = parser.parse_args()
    console = make_console()
    os.environ.update(OFFLINE | HUGE_PAGES | importable())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    steps = 2 * (WARM_UP + args.pairs * (args.steps + 1))
    with tempfile.TemporaryDirectory() as folder:
        with step(console, "engine"):
            llm = LLM(
                str(write_random_model(Path(folder), *args.heads)),
                attention_backend="relay",
                worker_extension_cls="benchmarks.suites.bench_metrics.MetricsWorker",
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=max(args.shared) + args.own + steps,
                max_num_seqs=args.requests,
            )
        rows = []
        for shared in args.shared:
            with step(console, f"{shared:,} shared tokens"):
                rows.append(measure(llm, shared, args))
    table = Table(title="Metrics, per decode step")
    for name in ("shared tokens", "with, ms", "without, ms", "overhead", "95 % interval"):
        table.add_column(name, justify="right")
    for row in rows:
        interval = f"{row['overhead_low']:+.2%} to {row['overhead_high']:+.2%}"
        table.add_row(
            f"{row['shared_tokens']:,}",
            f"{row['with_step_ms']:.2f}",
            f"{row['without_step_ms']:.2f}",
            f"{row['overhead']:+.2%}",
            interval,
        )
    console.print(table)
    if args.save:
        save(console, "metrics", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
