"""Decode throughput of relay against vLLM's own backend: two real engines, measured in turns.

    python benchmarks/bench_decode.py --shared 8192 2048 0 --save

The model has 4 layers, by default with 16 query and 16 KV heads of size 128 (attention weighs most
in that shape), and random weights of realistic scale; ``--model`` takes a real one in its place.
``--shared 0`` is a batch with nothing shared: what the plugin costs when it cannot help, and what
throughput there would be without a prefix. The arithmetic of the prefix at the rate of a bf16
matrix product of the same run is beside every measurement.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import OFFLINE, ROOT, provenance, write_csv
from benchmarks.random_model import LAYERS, VOCABULARY, write_random_model

BACKENDS = {"stock": "CPU_ATTN", "relay": "relay"}
# Greedy tokens of two bf16 paths part at near-ties; before that their log-probabilities may differ
# by rounding only. The proof of exactness is tests/e2e/test_parity.py; this catches a run that
# measured nonsense.
AGREEMENT = 0.1

Answer = list[tuple[int, float]]


class Engine:
    """One `vllm.LLM`, stepped by hand so that decode steps can be timed apart from prefill."""

    def __init__(
        self, model: Path, backend: str, settings: dict[str, int], max_model_len: int, requests: int
    ) -> None:
        from vllm import LLM  # seconds to import: --help should not wait for it

        self._llm = LLM(
            str(model),
            attention_backend=backend,
            additional_config={"relay": settings},
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            max_num_seqs=requests,
            enforce_eager=True,
            enable_prefix_caching=True,
        )
        self._requests = 0

    def counters(self) -> dict[str, int]:
        return dict(self._llm.collective_rpc("relay_counters")[0])

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[float, list[Answer]]:
        """Produce ``steps`` tokens for each prompt at once.

        Returns:
            tokens per second from the moment every request has its second token, and for each
            request its ``(token, log-probability)`` pairs.
        """
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        params = SamplingParams(
            temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False, logprobs=0
        )
        outputs: dict[str, Any] = {}
        for prompt in prompts:
            self._requests += 1
            engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, params)
        begun, counted = 0.0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output.outputs[0]
            done = sum(len(o.token_ids) for o in outputs.values())
            slowest = min((len(o.token_ids) for o in outputs.values()), default=0)
            if not begun and len(outputs) == len(prompts) and slowest >= 2:
                begun, counted = time.perf_counter(), done
        ended, produced = time.perf_counter(), len(prompts) * steps - counted
        in_order = sorted(outputs.items(), key=lambda item: int(item[0]))
        answers = [
            [(t, step[t].logprob) for t, step in zip(o.token_ids, o.logprobs, strict=True)]
            for _, o in in_order
        ]
        return produced / (ended - begun), answers


def agreement(ours: list[Answer], theirs: list[Answer]) -> float:
    """RMS of log-probability differences over the tokens before two greedy answers part."""
    squares = []
    for a, b in zip(ours, theirs, strict=True):
        for (token, logprob), (other, other_logprob) in zip(a, b, strict=True):
            if token != other:
                break
            squares.append((logprob - other_logprob) ** 2)
    return float(np.sqrt(np.mean(squares))) if squares else float("inf")


def make_prompts(shared: int, own: int, requests: int, rng: np.random.Generator) -> list[list[int]]:
    prefix = rng.integers(3, VOCABULARY, shared).tolist()
    return [prefix + rng.integers(3, VOCABULARY, own).tolist() for _ in range(requests)]


def ceiling_gflop_s() -> float:
    """The rate of a bf16 matrix product on one thread, as the engine's worker has."""
    import torch

    from benchmarks.ceilings import gemm_rate

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rate = gemm_rate()
    torch.set_num_threads(before)
    return rate / 1e9


def measure(engines: dict[str, Engine], shared: int, args: argparse.Namespace) -> dict[str, Any]:
    """One case: rounds in which each engine decodes the same prompts, first one, then the other."""
    rng = np.random.default_rng(shared)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    worst = 0.0
    before = engines["relay"].counters()
    for round_index in range(args.repeats + 1):
        prompts = make_prompts(shared, args.own, args.requests, np.random.default_rng(shared))
        for prompt in prompts:  # own tokens change each round, the shared prefix stays cached
            prompt[shared:] = rng.integers(3, VOCABULARY, args.own).tolist()
        answers = {}
        names = list(engines) if round_index % 2 else list(engines)[::-1]
        for name in names:
            rate, answers[name] = engines[name].decode(prompts, args.steps)
            if round_index > 0:  # the first round fills the prefix cache and warms up
                rates[name].append(rate)
        worst = max(worst, agreement(answers["relay"], answers["stock"]))
    after = engines["relay"].counters()
    ratios = [r / s for r, s in zip(rates["relay"], rates["stock"], strict=True)]
    stock, relay = (statistics.median(rates[name]) for name in ("stock", "relay"))
    gemm = ceiling_gflop_s()
    operations = 4 * args.layers * args.heads[0] * args.heads[2] * args.requests * shared
    return {
        "model": args.model.name if args.model else "random",
        "layers": args.layers,
        "query_heads": args.heads[0],
        "kv_heads": args.heads[1],
        "head_size": args.heads[2],
        "shared_tokens": shared,
        "own_tokens": args.own,
        "requests": args.requests,
        "steps": args.steps,
        "rounds": args.repeats,
        "stock_tok_s": round(stock, 2),
        "relay_tok_s": round(relay, 2),
        "stock_step_ms": round(1e3 * args.requests / stock, 3),
        "relay_step_ms": round(1e3 * args.requests / relay, 3),
        "prefix_ms_at_gemm_rate": round(operations / gemm / 1e6, 3),
        "gemm_gflop_s": round(gemm, 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "steps_relayed": after["steps_relayed"] - before["steps_relayed"],
        "kv_gib_not_read": round(
            (after["kv_bytes_not_read"] - before["kv_bytes_not_read"]) / 2**30, 2
        ),
        "logprob_rms": round(worst, 5),
    }


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="Decode throughput, tokens per second (medians)")
    for heading in (
        "shared",
        "requests",
        "stock",
        "relay",
        "ratio",
        "min to max",
        "KV not read",
        "logprob rms",
    ):
        table.add_column(heading, justify="right")
    for r in rows:
        table.add_row(
            f"{r['shared_tokens']:,}",
            str(r["requests"]),
            f"{r['stock_tok_s']:,.0f}",
            f"{r['relay_tok_s']:,.0f}",
            f"{r['ratio']:.3f}",
            f"{r['ratio_min']:.3f} to {r['ratio_max']:.3f}",
            f"{r['kv_gib_not_read']:,.1f} GiB",
            f"{r['logprob_rms']:.4f}",
        )
    console.print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A decode step by the length of the prefix, and the least that its arithmetic adds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(rows, key=lambda row: row["shared_tokens"])
    lengths = [row["shared_tokens"] for row in rows]
    least = [
        rows[0]["relay_step_ms"] + row["prefix_ms_at_gemm_rate"] - rows[0]["prefix_ms_at_gemm_rate"]
        for row in rows
    ]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(lengths, [r["stock_step_ms"] for r in rows], marker="o", label="vLLM's own")
    axes.plot(lengths, [r["relay_step_ms"] for r in rows], marker="o", label="relay")
    axes.plot(
        lengths, least, color="black", linestyle=":",
        label="the shortest step, and the prefix's arithmetic\nat the rate of a matrix product",
    )  # fmt: skip
    axes.set_xlabel("tokens of the shared prefix")
    axes.set_ylabel("milliseconds per decode step")
    axes.set_ylim(bottom=0)
    row = rows[0]
    axes.set_title(
        f"{row['requests']} requests, {row['layers']} layers, "
        f"{row['query_heads']}/{row['kv_heads']} heads of {row['head_size']}",
        fontsize="medium",
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shared",
        type=int,
        nargs="+",
        default=[8192, 2048, 0],
        help="shared tokens, one case each",
    )
    parser.add_argument(
        "--own", type=int, default=64, help="tokens each request adds to the prefix"
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=48, help="tokens each request produces")
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds per case")
    parser.add_argument(
        "--heads",
        type=int,
        nargs=3,
        default=[16, 16, 128],
        metavar=("QUERY", "KV", "SIZE"),
        help="query heads, KV heads and head size of the model",
    )
    parser.add_argument(
        "--model", type=Path, help="folder of a real model in place of a random one"
    )
    parser.add_argument("--min-saved-tokens", type=int, help="the setting of that name")
    parser.add_argument("--save", action="store_true", help="write a CSV to benchmarks/results")
    args = parser.parse_args()
    console = Console()
    os.environ.update(OFFLINE)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        console.print("starting two engines (a minute or two)")
        if args.model is None:
            args.layers = LAYERS
            model = write_random_model(Path(folder), *args.heads)
        else:
            model = args.model
            config = json.loads((model / "config.json").read_text())
            args.layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
            size = config.get("head_dim") or config["hidden_size"] // heads
            args.heads = [heads, config["num_key_value_heads"], size]
        longest = max(args.shared) + args.own + args.steps
        settings = (
            {} if args.min_saved_tokens is None else {"min_saved_tokens": args.min_saved_tokens}
        )
        engines = {
            name: Engine(model, backend, settings, longest, args.requests)
            for name, backend in BACKENDS.items()
        }
        rows = []
        for shared in args.shared:
            rows.append(measure(engines, shared, args))
            console.print(
                f"  {shared:,} shared tokens: ratio {rows[-1]['ratio']:.3f}", highlight=False
            )
    wrong = [r for r in rows if not r["logprob_rms"] <= AGREEMENT]
    if wrong:
        console.print(f"[red]answers differ, no speed is reported:[/] {wrong}")
        return 1
    show(console, rows)
    if args.save:
        path = write_csv(ROOT / "benchmarks" / "results" / "decode.csv", rows, provenance())
        console.print(f"wrote {path.relative_to(ROOT)}")
        if len(rows) > 2:
            plot(rows, path.with_suffix(".png"))
            console.print(f"wrote {path.with_suffix('.png').relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
