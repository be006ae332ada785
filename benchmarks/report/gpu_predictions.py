"""The tables of docs/cuda.md: what `gpu_check.py` measured, what the cost model of GPUs predicts.

    python benchmarks/report/gpu_predictions.py          # writes them between their marks

Beside the predictions (`sharing.gpu`) stand our measurements of the same steps, and those that
others published.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.gpu.parity import FACTOR
from benchmarks.harness.environment import RESULTS, ROOT
from benchmarks.harness.result_csv import Row, read
from benchmarks.report.markdown import table
from benchmarks.report.published import PUBLISHED
from vllm_relay.sharing import Costs, Planner
from vllm_relay.sharing.gpu import GPUS, Gpu, find_gpu, gpu_costs

PAGE = ROOT / "docs" / "cuda.md"
MARKS = "<!-- {}: begin -->\n", "<!-- {}: end -->\n"
BLOCK_SIZE = 16
# Tokens that each request has of its own.
OWN = 512
# (shared tokens, requests)
STEPS = ((2048, 32), (2048, 256), (8192, 32), (8192, 128), (32768, 64))
# Bytes of memory, nine tenths of which hold weights and KV.
GENERATIONS = {"A100": 80e9, "L40S": 48e9, "H100": 80e9, "H200": 141e9, "B200": 180e9}
# A gain below it is none.
PAYS = 1.01
# A100s of a lower bandwidth: Hydragen's, and FlashInfer's.
A100_40GB = replace(GPUS["A100"], memory=1.555e12)
A100_PCIE = replace(GPUS["A100"], memory=1.935e12)
# What the kernels of others reached, each from one of their measurements. Of memory's rate, the
# paged kernel of vLLM 0.2.6: 16,384 tokens on an A40. FlashInfer's cascade of February 2024 on an
# H100, whose instructions it did not use, beside its time here: 8,192 tokens, 256 requests.
PAGED_SHARE, ON_HOPPER = 0.6, 1.7


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model on one rank.

    Attributes:
        layers: that share; windows of 128 tokens do not. heads, kv_heads, head_size: of the rank.
        weights: bytes that a step reads of them; of experts those that its tokens choose.
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    weights: float
    experts: float = 0.0
    chosen: float = 0.0  # share of the experts that a token chooses

    def read(self, rows: int) -> float:
        """Bytes of weights that a step of so many tokens reads."""
        return self.weights + self.experts * (1 - (1 - self.chosen) ** rows)

    def held(self, rows: int, shared: int) -> float:
        """Bytes of weights, and of KV that is stored once."""
        tokens = shared + rows * OWN
        kv = 2 * self.layers * self.kv_heads * self.head_size * 2
        return self.weights + self.experts + tokens * kv


MODELS = {
    "Llama-3-8B": Model(layers=32, heads=32, kv_heads=8, head_size=128, weights=16.1e9),
    "Qwen3-32B": Model(layers=64, heads=64, kv_heads=8, head_size=128, weights=65.5e9),
    "Llama-3-70B, 1 of 8 ranks": Model(
        layers=80, heads=8, kv_heads=1, head_size=128, weights=141.2e9 / 8
    ),
    "gpt-oss-20b": Model(
        layers=12, heads=64, kv_heads=8, head_size=64,
        weights=3.6e9, experts=10.2e9, chosen=4 / 32,
    ),
}  # fmt: skip


def attention(costs: Costs, rows: int, shared: int, own: int) -> tuple[float, float]:
    """Seconds per layer of a baseline's own attention and of what relay chooses."""
    planner = Planner(BLOCK_SIZE, costs, max_levels=1)
    blocks = shared // BLOCK_SIZE
    mine = np.arange(rows * -(-own // BLOCK_SIZE), dtype=np.int32).reshape(rows, -1) + blocks + 1
    prefix = np.tile(np.arange(1, blocks + 1, dtype=np.int32), (rows, 1))
    lens = np.full(rows, blocks * BLOCK_SIZE + own, dtype=np.int32)
    choice = planner.plan(np.hstack([prefix, mine]), lens, np.ones_like(lens))
    return choice.stock, min(choice.stock, choice.relay)


@cache
def gains(gpu: Gpu, model: Model, rows: int, shared: int) -> tuple[float, float]:
    """Speed-up of attention and of the whole step, without sampling and what the host adds."""
    shape = (model.heads, model.kv_heads, model.head_size)
    stock, relay = attention(gpu_costs(gpu, *shape), rows, shared, OWN)
    rest = model.read(rows) / gpu.memory
    step = (rest + model.layers * stock) / (rest + model.layers * relay)
    return stock / relay, step


def break_even(gpu: Gpu, model: Model, shared: int) -> int:
    """Fewest requests for which relay is predicted to be faster."""
    return next(n for n in range(2, 4096) if gains(gpu, model, n, shared)[0] > PAYS)


def predictions() -> Iterator[list[str]]:
    for name, model in MODELS.items():
        for key, memory in GENERATIONS.items():
            cells = []
            for shared, rows in STEPS:
                attention_gain, step_gain = gains(GPUS[key], model, rows, shared)
                cells.append(f"{attention_gain:.1f} / {step_gain:.2f}")
                if model.held(rows, shared) > 0.9 * memory:
                    cells[-1] = "-"
            if any(cell != "-" for cell in cells):
                yield [name, key, *cells, str(break_even(GPUS[key], model, 8192))]


def of_vllm_02(gpu: Gpu, *shape: int) -> Costs:
    """Costs of vLLM 0.2.6, whose paged kernel reads from memory what is shared, too."""
    rate = PAGED_SHARE * gpu.memory
    paged = gpu_costs(replace(gpu, memory=rate, l2_rate=rate, in_step=rate), *shape).stock
    return replace(gpu_costs(gpu, *shape), stock=paged, context=paged)


def of_flashinfer(gpu: Gpu, slower: float, *shape: int) -> Costs:
    """Costs of a cascade that takes ``slower`` times as long."""
    costs = gpu_costs(gpu, *shape)
    return replace(costs, context=costs.context.times(slower), system=costs.system.times(slower))


def published() -> Iterator[list[str]]:
    """Speed-ups of others, and the model's; the last column is how far it is off."""
    for row in read(PUBLISHED, text=()):
        rows, shared = int(row["requests"]), int(row["prefix_tokens"])
        if row["of"] == "attention of one layer":
            # 32 heads of 128, as Llama-2-7B.
            costs = of_vllm_02(GPUS["A40"], 32, 32, 128)
            stock, ours = attention(costs, rows, shared, int(row["context_tokens"]))
            theirs = row["vllm"] / row["shared_attention"]
        elif row["of"] == "decode, Hydragen":
            # CodeLlama-13b: 40 layers of 40 heads, on 8 ranks. What is not attention is measured;
            # 128 tokens are made, so that a request has 64 of its own on average.
            each = attention(of_vllm_02(A100_40GB, 5, 5, 128), rows, shared, 64)
            rest = rows / (1e3 * row["no_attention"])
            stock, ours = (rest + 40 * seconds for seconds in each)
            theirs = row["shared_attention"] / row["vllm"]
        elif row["of"] == "attention of one layer, FlashInfer":
            given = (A100_PCIE, 1.0) if "A100" in row["hardware"] else (GPUS["H100"], ON_HOPPER)
            costs = of_flashinfer(*given, 32, 32, 128)
            stock, ours = attention(costs, rows, shared, int(row["context_tokens"]))
            theirs = row["shared_attention"] / row["vllm_prefix_sharing"]
        else:
            continue
        off = max(stock / ours / theirs, theirs * ours / stock)
        own = row["context_tokens"] or 64
        yield [row["of"], row["hardware"], f"{rows:,}", f"{shared:,}", f"{own:,}",
               f"{theirs:.1f}", f"{stock / ours:.1f}", f"{off:.2f}"]  # fmt: skip


def passed(part: str) -> list[Row]:
    """Rows that passed in all CSVs of a part, the oldest first."""
    files = sorted(RESULTS.glob(f"gpu-{part}-*.csv"))
    return [row for file in files for row in read(file) if row["status"] == "pass"]


def links(part: str) -> str:
    """Markdown: the CSVs of a part."""
    names = sorted(file.name for file in RESULTS.glob(f"gpu-{part}-*.csv"))
    return ", ".join(f"[CSV](../benchmarks/results/{name})" for name in names)


def layers() -> Iterator[list[str]]:
    """One layer's attention in a step, as measured and as predicted."""
    found: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in passed("op"):
        shape = tuple(row[k] for k in ("query_heads", "kv_heads", "batch", "shared", "own"))
        if row["batch"] > 1:  # relay's kernels do not run for one request
            found.setdefault(shape, {})[row["system"]] = row
    for (heads, kv_heads, rows, shared, own), systems in found.items():
        us = {name: row["us"] for name, row in systems.items()}
        stock, relay = min(us["stock"], us["stock-graphs"]), us["relay-layer"]
        times = "-"
        if systems["relay-layer"]["groups"]:
            _, gpu = find_gpu(systems["stock"]["device"]) or ("", GPUS["H100"])
            costs = gpu_costs(gpu, heads, kv_heads, systems["stock"]["head_size"])
            alone, chosen = attention(costs, rows, shared, own)
            times = f"{alone / chosen:.2f}"
        yield [f"{heads}/{kv_heads}", str(rows), f"{shared:,}", str(own), f"{stock:.0f}",
               f"{relay:.0f}", f"{us['relay'] - relay:.0f}", f"{stock / relay:.2f}",
               times]  # fmt: skip


def engines() -> Iterator[list[str]]:
    """Decode of whole engines."""
    for row in passed("engine-8b"):
        yield [row["date"][11:16], row["system"], str(row["batch"]), f"{row['shared']:,}",
               str(row["own"]), f"{row['ms_per_step']:.2f}", f"{row['tok_s']:,.0f}",
               f"{row['tok_s_min']:,.0f} to {row['tok_s_max']:,.0f}",
               f"{row['times_stock'] or 1.0:.2f}"]  # fmt: skip


def answers() -> Iterator[list[str]]:
    """Engines whose log-probabilities were compared with float32, and with stock's distance."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in {row["case"]: row for row in passed("parity")}.values():
        if row["system"] != "stock" and row["groups"]:
            more = [row["relay_config"], "drafts" if " drafts " in row["case"] else ""]
            more += ["system KV" if row["system_kv"] else ""]
            graphs = "no" if row["cudagraph_mode"] == "NONE" else "full"
            kind = (row["model"], row["runner"], graphs, row["dtype"], row["kv_cache"])
            found.setdefault((*kind, " ".join(filter(None, more)), row["system"]), []).append(row)
    for (*kind, system), rows in found.items():
        ratios = [FACTOR * row["rms"] / row["bound_rms"] for row in rows]
        shown = f"{max(ratios):.2f}" if system == "relay" else f"error seen, {min(ratios):.1f}"
        yield [*kind, str(len(rows)), shown]


def measured() -> str:
    """Everything between the marks "measured"."""
    op, engine = passed("op")[-1], passed("engine-8b")[-1]
    last = {(row["system"], row["shared"]): row["ms_per_step"] for row in passed("engine-8b")}
    most = last["stock", 8192] / last["stock", 0]
    shape = ["requests", "shared tokens", "own tokens"]
    columns = ["vLLM, \u00b5s", "relay, \u00b5s", "plan, \u00b5s", "speed-up", "predicted"]
    systems = ["ms per step", "tokens/s", "of windows", "times vLLM"]
    kind = ["runner", "graphs", "dtype", "KV cache", "with"]
    return (
        f"On an {op['device']} (driver {op['driver']}, torch {op['torch']}, vLLM {op['vllm']}, "
        f"Triton {op['triton']}): attention of one layer, bf16, heads of {op['head_size']}, in "
        "CUDA graphs, L2 flushed before each run. vLLM is FlashAttention 3 as vLLM calls it. The "
        "plan is made once per step, for all layers. Without a prediction: too little would be "
        "saved, and the step runs as vLLM's own; what is shown is what relay's kernels cost when "
        "they find nothing to do. The constants of this GPU in `sharing/gpu.py` are fitted to the "
        f"first run of this table. Runs, the oldest first: {links('op')}.\n\n"
        f"{table(['heads', *shape, *columns], layers())}\n"
        f"Whole engines with the shape of Llama-3-8B and dummy weights, medians of "
        f"{engine['windows']} windows of {engine['steps']} steps, runs after one another; cascade "
        f"is vLLM's own, on runner V1. Without any shared token vLLM is {most:.1f} times as fast "
        "as with 8,192: nothing that shares attention can gain more here "
        f"({links('engine-8b')}).\n\n"
        f"{table(['run', 'system', *shape, *systems], engines())}\n"
        "Answers of small models with random weights: root mean square distance of relay's "
        "log-probabilities of given tokens (with drafts: of its own) from float32, as a multiple "
        "of the distance of vLLM's own attention with the same precision and KV cache, in graphs "
        "on runner V2 (with drafts on V1); the largest of several batches. More than 2 fails. In "
        "the rows with an error, 0.1 was added to the LSE of shared segments, and the smallest "
        "multiple is shown. Only float16 is fine enough to see it: fp8 and the small gpt-oss are "
        "far from float32 by themselves, and would hide it below the bound "
        f"({links('parity')}).\n\n"
        f"{table(['model', *kind, 'batches', 'distance'], answers())}"
    )


def predicted() -> str:
    """Everything between the marks "predictions"."""
    steps = [f"{shared // 1024}K \u00d7 {rows}" for shared, rows in STEPS]
    headings = ["model", "GPU", *steps, "requests for a gain, 8K"]
    made = table(headings, predictions())
    columns = ["published", "hardware", "requests", "prefix tokens", "own tokens", "measured"]
    rows = list(published())
    beside = table([*columns, "predicted", "off by"], rows)
    met = sum(float(row[-1]) <= 1.5 for row in rows)
    return (
        "Predicted, not measured: decode steps of requests with a shared prefix and "
        f"{OWN} tokens of their own, in CUDA graphs; speed-up of attention / of the step (weights "
        "and attention). A dash: weights and KV do not fit. A100 and L40S have "
        "FlashAttention 2, where relay is off unless asked for, and slower than this.\n\n"
        f"{made}\n"
        "Speed-ups that others measured, and the model's prediction of the same steps, with what "
        f"their kernels reach; {met} of {len(rows)} are within a factor of 1.5. The papers' are "
        f"over vLLM 0.2.6 and 0.2.7, whose paged kernel read {PAGED_SHARE:.0%} of what memory "
        "delivers and found nothing in L2: that number is from the A40's last row, and holds for "
        "an A100. FlashInfer's are of its own kernels, with cascade and without. On an H100 its "
        f"cascade of early 2024 took {ON_HOPPER} times as long as the model gives it, a number "
        "from one row. PAT, FastTree and Forest Cascade Attention publish no numbers of single "
        "steps.\n\n"
        f"{beside}"
    )


def page(before: str) -> str:
    """The page with its tables made anew."""
    for name, made in (("measured", measured()), ("predictions", predicted())):
        begin, end = (mark.format(name) for mark in MARKS)
        head, rest = before.split(begin)
        before = head + begin + made + end + rest.split(end)[1]
    return before


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
