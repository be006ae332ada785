"""Parts ``engine-8b``, ``engine-7b``: decode throughput of engines on the shapes of real models.

Weights are dummies: the answers mean nothing, and the part ``parity`` is the check of exactness.
"""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine_runner import record, rows_of
from benchmarks.gpu.engine_systems import PARTS, EngineSetup
from benchmarks.gpu.journal import Clock, Journal, Row, Wrong
from benchmarks.gpu.models import SHAPES, roofline_tok_s, write_config
from benchmarks.gpu.systems import HEARD_AFTER, MIN_SAVED_TOKENS, PROBE_STEPS
from benchmarks.gpu.timing import (
    CEILING_COLUMNS,
    Ceilings,
    Stopwatch,
    measure_ceilings,
)

COLUMNS = (
    "model",
    "system",
    "runner",
    "cudagraph_mode",
    "batch",
    "shared",
    "own",
    "windows",
    "steps",
    "tok_s",
    "tok_s_min",
    "tok_s_max",
    "ms_per_step",
    "times_stock",
    "bar",
    "roofline_tok_s",
    "of_roofline",
    *CEILING_COLUMNS,
    "steps_relayed",
    "full_graphs",
    "cascade_steps",
    "same_tokens_as_stock",
    "correct",
)
BAR_SHARED, BAR_NO_SHARING = 3.0, 0.98
NOT_CHECKED = "dummy weights: answers prove nothing, part parity does"
# Seconds to start an engine of this size and run one case.
ENGINE_SECONDS = 120.0
OWN, WINDOWS, STEPS = 256, 5, 32
# Tokens of each request before the first window: by then relay plans every step that shares.
SETTLE = PROBE_STEPS + HEARD_AFTER + 2
# Steps of the case before that the counters may hear of late.
LAG = 3
# batch, shared tokens; the most important first
CASES = (
    (64, 8192),
    (64, 0),
    (1, 0),
    (256, 0),
    (8, 0),
    (16, 0),
    (256, 8192),
    (16, 8192),
    (64, 2048),
    (8, 8192),
    (256, 2048),
    (16, 2048),
    (8, 2048),
    (1, 8192),
    (1, 2048),
)


def make_case(
    batch: int, shared: int, vocabulary: int, windows: int = WINDOWS, steps: int = STEPS
) -> Row:
    """A case of the job "decode"."""
    return {
        "name": f"B={batch} P={shared}",
        "batch": batch,
        "shared": shared,
        "own": OWN,
        "windows": windows,
        "steps": steps,
        "settle": SETTLE,
        "seed": batch + shared,
        "vocabulary": vocabulary,
        # Windows, and tokens of the first requests while the last are prefilled, with room.
        "limit": SETTLE + (windows + 1) * steps + 64,
    }


def spec_of(
    system: EngineSetup, model: Path, cases: list[Row], cuda: bool = True
) -> dict[str, Any]:
    """Spec for `engine_process`; without `cuda` with CPU settings, for tests of this part."""
    longest = max(case["shared"] + case["own"] + case["limit"] for case in cases)
    engine: dict[str, Any] = {
        "model": str(model),
        "attention_backend": system.backend,
        "max_model_len": longest,
        "max_num_seqs": max(case["batch"] for case in cases),
        "max_num_batched_tokens": 16384,
        **dict(system.settings),
    }
    if cuda:
        engine |= {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.85,
            "kernel_config": {"enable_flashinfer_autotune": False},
            # The measured batches are captured as they are; fewer graphs start sooner.
            "compilation_config": {
                "cudagraph_capture_sizes": sorted({case["batch"] for case in cases})
            },
        }
    return {"job": "decode", "cases": cases, "engine": engine, "patches": list(system.patches)}


def judge(system: EngineSetup, case: Row, row: Row, roofline: float, others: dict[str, Row]) -> Row:
    """The columns of a finished case.

    Args:
        others: rows of the same case by system, as they came from the engines.

    Raises:
        Wrong: relay did not relay every timed step of what pays, or relayed where nothing is
            shared; a timed step was no full graph.
    """
    saved = (case["batch"] - 1) * case["shared"]
    pays = system.backend == "RELAY" and saved >= max(1, MIN_SAVED_TOKENS)
    timed, relayed, graphs = case["windows"] * case["steps"], row["steps_relayed"], row["replays"]
    counts = {
        "steps_relayed": relayed,
        "full_graphs": graphs,
        "cascade_steps": row["cascades"],
    }
    if relayed < timed - LAG if pays else relayed > LAG:
        raise Wrong(f"relayed {relayed} steps", counts)
    if system.graphs and graphs < timed:
        raise Wrong(f"ran {graphs} full CUDA graphs in {timed} timed steps", counts)
    rate = statistics.median(row["rates"])
    columns: Row = {
        **counts,
        "tok_s": round(rate, 1),
        "tok_s_min": round(min(row["rates"]), 1),
        "tok_s_max": round(max(row["rates"]), 1),
        "ms_per_step": round(1e3 * case["batch"] / rate, 3),
        "roofline_tok_s": round(roofline, 1),
        "of_roofline": round(rate / roofline, 3),
        "correct": NOT_CHECKED,
    }
    if system.against in others:
        stock = others[system.against]
        columns["times_stock"] = ratio = round(rate / median_rate(stock), 4)
        same = [a == b for a, b in zip(row["tokens"], stock["tokens"], strict=True)]
        columns["same_tokens_as_stock"] = round(sum(same) / len(same), 3)
        least = {(64, 8192): BAR_SHARED}.get((case["batch"], case["shared"]))
        least = BAR_NO_SHARING if case["shared"] == 0 else least
        if system.backend == "RELAY" and least is not None:
            met = "met" if ratio >= least else "MISSED"
            columns["bar"] = f"{met}: >= {least:g} x {system.against}"
    if system.name == "cascade" and row["cascades"] and "relay" in others:
        ratio = median_rate(others["relay"]) / rate
        verdict = "met" if ratio >= 1 else "MISSED"
        columns["bar"] = f"{verdict}: relay >= cascade ({ratio:.3f})"
    return columns


def median_rate(row: Row) -> float:
    return statistics.median(row["rates"])


def run_model(
    model: str,
    path: Path,
    systems: list[EngineSetup],
    cases: list[Row],
    ceilings: Ceilings,
    folder: Path,
    journal: Journal,
    clock: Clock,
    cuda: bool = True,
) -> list[str]:
    """All systems over all cases of one model; returns what was left out."""
    left_out: list[str] = []
    found: dict[str, dict[str, Row]] = {case["name"]: {} for case in cases}

    def asked_of(system: EngineSetup) -> list[Row]:
        return [case for case in cases if not (system.alone and case["shared"])]

    open_systems = [
        system
        for system in systems
        if any(not journal.find(f"{model} {system.name}: {c['name']}") for c in asked_of(system))
    ]
    # A ratio is of one run: what an open system is held against runs again.
    wanted = {name for system in open_systems for name in (system.name, system.against)}
    wanted |= {"relay"} if "cascade" in wanted else set()
    for system in systems:
        title, asked = f"{model} {system.name}", asked_of(system)
        if system.name not in wanted:
            continue
        if clock.left() < ENGINE_SECONDS:
            left_out.append(title)
            continue
        environment = {"VLLM_USE_V2_MODEL_RUNNER": "1" if system.runner == "v2" else "0"}
        spec = spec_of(system, path, asked, cuda)
        rows = rows_of(spec, folder, title.replace(" ", "-"), clock, environment)

        def shared(case: Row, row: Row, system: EngineSetup = system) -> Row:
            return {
                "model": model,
                "system": system.name,
                "runner": system.runner,
                "cudagraph_mode": row["cudagraph_mode"],
                **{k: case[k] for k in ("batch", "shared", "own", "windows", "steps")},
                **ceilings.row(),
            }

        def columns(case: Row, row: Row, system: EngineSetup = system) -> Row:
            others = found[case["name"]]
            judged = judge(system, case, row, roofline_tok_s(model, case, ceilings), others)
            others[system.name] = row
            return judged

        left_out += record(rows, asked, title, journal, shared, columns)
    return left_out


def run(
    journal: Journal, clock: Clock, chosen: Callable[[str], bool], quick: bool, part: str
) -> list[str]:
    """One of `PARTS`. `chosen` is asked for each engine ("llama-3-8b relay")."""
    ceilings = measure_ceilings(Stopwatch())
    torch.cuda.empty_cache()
    model, all_systems = PARTS[part]
    systems = [s for s in all_systems if chosen(f"{model} {s.name}")]
    vocabulary = SHAPES[model]["vocab_size"]
    windows = 2 if quick else WINDOWS
    cases = [make_case(*sizes, vocabulary, windows) for sizes in (CASES[:2] if quick else CASES)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_config(folder / model, model)
        return run_model(model, path, systems, cases, ceilings, folder, journal, clock)
