"""Differential soak: relay against stock vLLM, under one load, in one set of options after another.

A chunk is one row of a pairwise cover of `OPTIONS`: a small model in float32 on the real engine, a
KV pool that is too small, requests that are aborted, resets of the prefix cache and new weights.
Every read of a packed segment is compared with its blocks, and the setting ``scrub`` is on. An
answer that is not stock's, a stale read and a fallback are failures.

    python -m tests.soak --part differential
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.harness.random_model import VOCABULARY, write_random_model
from tests.engine.engine import run_engine
from tests.engine.system_kv import build

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
WAVES, STEPS, POOL_TOKENS = 60, 120, 1408
PREFIX = np.random.default_rng(11).integers(3, VOCABULARY, size=300).tolist()
OPTIONS: dict[str, tuple[Any, ...]] = {
    "block_size": (32, 64, 128),
    "chunked": (True, False),
    "drafts": (False, True),
    "lora": (False, True),
    "salts": (False, True),
    "system_kv": (False, True),
    "workers": (1, 2),
}
# Log-probabilities in float32 differ by rounding; other KV makes 1 and more.
TOLERANCE = 1e-3


def cover(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which every two values of two options occur together."""
    rng = Random(0)
    left = {
        ((a, x), (b, y))
        for a, b in combinations(options, 2)
        for x, y in product(options[a], options[b])
    }
    rows = []
    while left:
        tried = [{name: rng.choice(values) for name, values in options.items()} for _ in range(200)]
        row = max(tried, key=lambda row: len(left.intersection(combinations(row.items(), 2))))
        left.difference_update(combinations(row.items(), 2))
        rows.append(row)
    return rows


ROWS = [{**row, "fast_prefill": False} for row in cover(OPTIONS)]
ROWS.append({**ROWS[0], "fast_prefill": True})  # which relay leaves to vLLM
CHUNKS = len(ROWS)


def run_chunk(chunk: int) -> dict[str, Any]:
    """The soak's row of one chunk."""
    return compare(ROWS[chunk], WAVES)


def compare(row: Mapping[str, Any], waves: int, steps: int = STEPS) -> dict[str, Any]:
    """The soak's row of one row of options: how relay's answers differ from stock's.

    steps: tokens of each answer.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        relay, stock = _runs(row, waves, steps, folder)
    wrong, compared = differences(relay["answers"], stock["answers"])
    for line in wrong:
        print(f"differential: {line}", file=sys.stderr, flush=True)
    stale = sum(worker["stale"] for worker in relay["watched"])
    counters = relay["counters"][0]
    fallbacks = sum(worker["fallbacks"] for worker in relay["counters"])
    unused = (counters["steps_relayed"] == 0) != row["fast_prefill"]
    return {
        **row,
        **{key: relay[key] for key in ("preemptions", "aborts", "resets", "reloads")},
        "steps_relayed": counters["steps_relayed"],
        "packed_reads": sum(worker["reads"] for worker in relay["watched"]),
        "tokens_compared": compared,
        "mismatches": len(wrong),
        "stale": stale,
        "fallbacks": fallbacks,
        "failures": len(wrong) + stale + fallbacks + unused,
    }


def _runs(row: Mapping[str, Any], waves: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    model = write_random_model(folder / "model", HEADS, KV_HEADS, HEAD_SIZE)
    engine: dict[str, Any] = {
        "dtype": "float32",
        "block_size": row["block_size"],
        "num_gpu_blocks_override": POOL_TOKENS // row["block_size"],
        "max_num_batched_tokens": 384 if row["chunked"] else 4096,
        "tensor_parallel_size": row["workers"],
        "kv_sharing_fast_prefill": row["fast_prefill"],
    }
    if row["drafts"]:
        ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
        engine["speculative_config"] = ngram
    if row["lora"]:
        engine |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    spec = {
        "model": str(model),
        "vocabulary": VOCABULARY,
        "waves": waves,
        "steps": steps,
        "salts": row["salts"],
        "lora": [write_adapter(folder / f"adapter-{i}", model, i) for i in (1, 2)]
        if row["lora"]
        else None,
        "prefix": PREFIX if row["system_kv"] else None,
        "resets": True,
    }
    settings: dict[str, Any] = {"min_saved_tokens": 0, "scrub": True}
    if row["system_kv"]:
        options = ("--skip-tokenizer-init", "--max-model-len", "1024", "--dtype", "float32")
        settings["system_kv"] = str(build(folder / "prefix.relay", model, PREFIX, *options))
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if row["workers"] == 2 else {}
    runs = []
    for backend, watch, given in (("relay", True, settings), ("CPU_ATTN", None, {})):
        arguments = {**engine, "additional_config": {"relay": given} if given else {}}
        full = {**spec, "backend": backend, "watch": watch, "engine": arguments}
        runs.append(run_engine(folder, full, "run_load.py", **env))
    return runs


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[list[str], int]:
    """Requests that answer otherwise, in words, and the number of tokens compared.

    Where log-probabilities tie, another token is no difference; the answers part there.
    """
    wrong: list[str] = []
    compared = 0
    for wave, other_wave in zip(ours, theirs, strict=True):
        wrong += [f"{name} has one answer only" for name in wave.keys() ^ other_wave.keys()]
        for name in wave.keys() & other_wave.keys():
            pairs = zip(wave[name], other_wave[name], strict=False)
            for at, ((token, logprob), (other, expected)) in enumerate(pairs):
                compared += 1
                if abs(logprob - expected) > TOLERANCE:
                    wrong.append(f"{name}: token {at} is {token} with {logprob:.4f}, "
                                 f"stock's {other} with {expected:.4f}")  # fmt: skip
                if token != other or abs(logprob - expected) > TOLERANCE:
                    break
    return wrong, compared


def write_adapter(folder: Path, model: Path, seed: int) -> str:
    """A LoRA adapter of rank 8 on queries and values, with random weights that change answers."""
    folder.mkdir()
    shape = json.loads((model / "config.json").read_text())
    generator, hidden = torch.Generator().manual_seed(seed), shape["hidden_size"]
    tensors = {}
    for layer, (name, rows) in product(
        range(shape["num_hidden_layers"]),
        (("q_proj", hidden), ("v_proj", shape["num_key_value_heads"] * shape["head_dim"])),
    ):
        place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{place}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) / 8
        tensors[f"{place}.lora_B.weight"] = torch.randn(rows, 8, generator=generator) / 8
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
