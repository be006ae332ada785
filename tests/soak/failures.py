"""Fail the n-th: one exception in relay, in the real CPU engine.

For n from 1 to 200, an exception is raised at the n-th call of each seam: an allocation, a native
call, planning, the writing of a system KV, keeping it packed included, and what the scheduler asks
of it. Requests share a system KV and a prefix, so that steps are relayed, and the prefix cache is
reset, so that the system KV is written again. Every run of a seam has the same schedule.

A failure is an engine that dies, tokens that are not stock vLLM's on the same engine,
log-probabilities beyond the tolerance of the parity tests, any number of log lines but one with the
cause, and any number of counted fallbacks but one. An n that a seam does not reach is a failure.

    python -m tests.soak --part failures
"""

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.random_model import VOCABULARY, write_random_model
from tests.engine.engine import ROOT, run_engine, run_forked
from tests.soak.seams import SEAMS

CHUNKS = 20
N_PER_CHUNK = 10
BLOCK = 32
MODEL_LEN = 512
# One line, whose cause is in words of its own: a tensor of a file that cannot be allocated.
REWORDED = re.compile(
    r"lines in the log: \['relay: system KVs are not used any more: \S+: no memory for tensor \S+; "
    r"their 3 blocks are free\. A restart loads them again if they fit'\]"
)
# Relayed steps with 8 native calls each; resets with 50 or 13 calls each: more than 200.
STEPS, RESETS = 30, {"system KV": 6, "scheduler": 16}


def run_chunk(chunk: int) -> dict[str, Any]:
    """The soak's row of one chunk: ``reached`` are the runs in which the exception was raised."""
    first = 1 + chunk * N_PER_CHUNK
    runs = [(seam, n, None) for n in range(first, first + N_PER_CHUNK) for seam in SEAMS]
    try:
        result = fail(runs)
    except AssertionError as error:  # killed by a signal
        print(error)
        result = {"runs": [], "difference": 0.0}
    done = result["runs"]
    wrong = [
        (run, text)
        for run, (_, text) in zip(runs, done, strict=False)
        if text and not REWORDED.fullmatch(text)
    ]
    for run, text in wrong:
        print(f"{run}: {text}", flush=True)
    return {
        "first_n": first,
        "runs": len(runs),
        "reached": sum(calls >= n for (_, n, _), (calls, _) in zip(runs, done, strict=False)),
        "largest_difference": result["difference"],
        "failures": len(wrong) + len(runs) - len(done),
    }


def fail(runs: list[tuple[str, int, str | None]]) -> dict[str, Any]:
    """The result of `tests/engine/run_failures.py` for runs: seam, n and fault."""
    folder, engine, schedules = _setting()
    return run_engine(
        folder, {"engine": engine, "schedules": schedules, "runs": runs}, "run_failures.py"
    )


_kept: list[Any] = []  # until this process ends


@cache
def _setting() -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A folder with a model and its system KV, the engine's arguments, and a schedule per seam."""
    _kept.append(temporary := tempfile.TemporaryDirectory())
    folder = Path(temporary.name)
    model = write_random_model(folder / "model", 4, 2, 32)
    source = iter(np.random.default_rng(1).integers(3, VOCABULARY, size=4000).tolist())

    def take(count: int) -> list[int]:
        return [next(source) for _ in range(count)]

    system, prefix = take(3 * BLOCK + 5), take(3 * BLOCK)
    settings = ("--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", MODEL_LEN)
    file, tokens = folder / "system.relay", folder / "system.json"
    tokens.write_text(json.dumps(system))
    options = ("--model", model, "--token-ids", tokens, "-o", file, "--enforce-eager", *settings)
    command = ROOT / "vllm_relay" / "cli" / "__main__.py"
    status, log = run_forked(command, ["build", *map(str, options)], folder)
    assert status == 0, log
    under_system = [system + take(9 + i) for i in range(4)]
    under_prefix = [prefix + take(7 + i) for i in range(4)]
    long = [[[prefix], 1], [[*under_system, *under_prefix], STEPS]]
    resets = [[[prefix], 1], [under_system, 2]]
    schedules = {seam: [long] for seam in SEAMS} | {
        seam: [resets] * count for seam, count in RESETS.items()
    }
    engine = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": MODEL_LEN,
        "max_num_seqs": 16,
        "block_size": BLOCK,
        "attention_backend": "relay",
        "additional_config": {"relay": {"min_saved_tokens": 0, "system_kv": str(file)}},
    }
    return folder, engine, schedules
