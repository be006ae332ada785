"""Part ``parity``: does an engine with relay answer as exactly as vLLM's own?

A random model with weights of realistic scale produces given tokens; their log-probabilities are
compared with transformers' own float32 run of the same weights. Relay may be no further from it
than twice stock FlashAttention in the same precision. A planted error must be seen by the same
comparison, in float16, whose rounding is an eighth of bfloat16's.
"""

import json
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.batches import BLOCK
from benchmarks.gpu.engine_runner import EngineFailed, record, rows_of
from benchmarks.gpu.journal import Clock, Journal, Row, Wrong, describe
from benchmarks.gpu.parity_runs import RUNS, Run, give_system_kvs
from benchmarks.harness.architectures import ARCHITECTURES
from benchmarks.harness.random_model import VOCABULARY, write_model, write_random_model

COLUMNS = (
    "model",
    "kv_cache",
    "system",
    "relay_config",
    "system_kv",
    "runner",
    "cudagraph_mode",
    "dtype",
    "requests",
    "groups",
    "steps",
    "rms",
    "p999",
    "bound_rms",
    "bound_p999",
    "cached_tokens",
    "steps_relayed",
    "full_graphs",
    "correct",
)
FACTOR = 2.0
# A stock engine this far off in root mean square is broken or runs another model.
COARSE, COARSE_FP8 = 0.3, 1.0
# requests, groups; every fifth request is in none. 50: graphs are of 64, and padded.
MIXES = ((64, 16), (256, 16), (50, 3), (256, 1), (8, 1), (2, 1), (64, 0), (1, 0))
# Relay starts up to PROBE_STEPS + HEARD_AFTER steps late: QUICK_STEPS are enough for as many more.
STEPS, QUICK_STEPS = 32, 24
FEW_MIXES = MIXES[2:3]
# With fewer values the 99.9th percentile is about their maximum.
P999_VALUES = 1000
# Tokens that are drafted at once.
DRAFTED = 3
# Seconds to start an engine and run a short case; with less time left none is started.
ENGINE_SECONDS = 50.0
PLANT = "benchmarks.gpu.engine_patches:plant_wrong_lse"
FORCE_V2 = "benchmarks.gpu.engine_patches:force_tokens_on_v2"


def make_case(requests: int, groups: int, steps: int) -> dict[str, Any]:
    """Prompts of one mix, shuffled, the groups' prefixes to warm the cache, and forced tokens."""
    rng = np.random.default_rng(1000 * requests + groups)

    def take(low: int, high: int) -> list[int]:
        return rng.integers(3, VOCABULARY, int(rng.integers(low, high))).tolist()

    prefixes = [take(100, 900) for _ in range(groups)]
    prompts = [
        take(60, 400) if not groups or i % 5 == 4 else prefixes[i % groups] + take(20, 90)
        for i in range(requests)
    ]
    return {
        "name": f"{requests} requests, {groups} groups",
        "requests": requests,
        "groups": groups,
        "warm_up": prefixes,
        "cacheable": sum(
            len(prefixes[i % groups]) // BLOCK * BLOCK
            for i in range(requests)
            if groups and i % 5 != 4
        ),
        "prompts": [prompts[i] for i in rng.permutation(requests)],
        "force": rng.integers(3, VOCABULARY, (requests, steps)).tolist(),
    }


def distances(row: Row, reference: Row) -> tuple[float, float]:
    """Differences in log-probability over all positions: root mean square, 99.9th percentile.

    Raises:
        Wrong: other tokens were produced.
    """
    if row["tokens"] != reference["tokens"]:
        raise Wrong("the engine did not produce the forced tokens")
    difference = np.abs(np.array(row["logprobs"]) - np.array(reference["logprobs"]))
    return float(np.sqrt((difference**2).mean())), float(np.quantile(difference, 0.999))


def judge(run: Run, case: Row, row: Row, reference: Row, bound: tuple[float, float] | None) -> Row:
    """The columns of a finished case.

    Args:
        bound: of `distances`; None for stock.

    Raises:
        Wrong: it is not as exact as asked, relayed nothing, or ran without full graphs; for a
            planted error: it was not seen.
    """
    found = distances(row, reference)
    columns: Row = {"rms": f"{found[0]:.4g}", "p999": f"{found[1]:.4g}"}
    steps = len(row["tokens"][0])
    coarse = COARSE if run.kv_cache == "auto" else COARSE_FP8
    limits = (coarse,) if bound is None else bound
    if len(row["tokens"]) * steps < P999_VALUES:
        limits = limits[:1]
    if bound is not None:
        columns |= {
            name: f"{limit:.4g}"
            for name, limit in zip(("bound_rms", "bound_p999"), limits, strict=False)
        }
    columns |= {"steps_relayed": row["steps_relayed"], "full_graphs": row["replays"]}
    columns["cached_tokens"] = row["cached"]
    if run.system_kv and row["cached"] != case["cacheable"]:
        raise Wrong(f"{row['cached']} tokens were cached, not {case['cacheable']}", columns)
    beyond = any(not x <= limit for x, limit in zip(found, limits, strict=False))
    relays = run.system != "stock" and case["groups"] > 0
    if relays != (row["steps_relayed"] > run.idle_steps(steps)):
        raise Wrong(f"relayed {row['steps_relayed']} steps", columns)
    if run.graphs and ("FULL" not in row["cudagraph_mode"] or not row["replays"]):
        mode = row["cudagraph_mode"] or "none"
        raise Wrong(f"no full CUDA graphs: {mode}, {row['replays']} ran", columns)
    if run.system == "planted":
        if relays and not beyond:
            raise Wrong("the comparison does not see the planted error", columns)
        return {**columns, "correct": "planted error seen" if relays else "yes"}
    if beyond:
        raise Wrong("further from float32 than the bound", columns)
    return {**columns, "correct": "yes"}


def spec_of(run: Run, model: Path, cases: list[Row], cuda: bool = True) -> dict[str, Any]:
    """Spec for `engine_process`; without `cuda` with CPU backends, for tests of this part."""
    own, stock = ("RELAY", "FLASH_ATTN" if cuda else "CPU_ATTN")
    engine: dict[str, Any] = {
        "model": str(model),
        "dtype": run.dtype,
        "attention_backend": stock if run.system == "stock" else own,
        "kv_cache_dtype": run.kv_cache,
        "additional_config": {"relay": {"min_saved_tokens": 0, **dict(run.relay)}},
        "max_model_len": 2048,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enforce_eager": not run.graphs,
    }
    if cuda:
        engine["gpu_memory_utilization"] = 0.3
        # Not measured at the start: that fails where another process frees memory meanwhile.
        engine["kv_cache_memory_bytes"] = 4 << 30
        engine["kernel_config"] = {"enable_flashinfer_autotune": False}
    if run.graphs:
        queries = 1 + DRAFTED if run.drafts else 1
        sizes = [queries * requests for requests in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
        engine["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    patches = [FORCE_V2] if run.runner == "v2" else []
    if run.system == "planted":
        patches.append(PLANT)
    if run.runner == "v1":
        # The processor that forces tokens counts them as they are produced.
        engine["async_scheduling"] = False
    if run.drafts:
        engine["speculative_config"] = {"model": str(model), "num_speculative_tokens": DRAFTED}
    return {
        "job": "free" if run.drafts else "force",
        "cases": cases,
        "engine": engine,
        "patches": patches,
        "forcing": None if run.drafts else run.runner,
    }


def run_all(
    runs: list[Run],
    cases: list[Row],
    model: Path,
    folder: Path,
    journal: Journal,
    clock: Clock,
    make_spec: Callable[[Run, Path, list[Row]], dict[str, Any]] = spec_of,
) -> list[str]:
    """All engines over all cases, each judged as soon as it is there; returns what was left out."""
    spec = {"job": "reference", "cases": cases, "engine": {"model": str(model)}}
    try:
        with closing(rows_of(spec, folder, "reference", clock, {})) as rows:
            exact = {row["name"]: row for row in rows}
        broken = [f"{name}: {row['error']}" for name, row in exact.items() if "error" in row]
        if broken:
            raise EngineFailed("; ".join(broken))
    except EngineFailed as error:
        journal.add("reference", {}, describe(error))
        return [run.name for run in runs]
    measured = [case for case in cases if "left_out" not in exact[case["name"]]]
    left_out = [case["name"] for case in cases if case not in measured]
    bounds: dict[tuple[Run, str], tuple[float, float]] = {}
    for run in runs:
        done = [journal.find(f"{run.name}: {case['name']}") for case in measured]
        if all(done):
            for case, row in zip(measured, done, strict=True):
                if run.system == "stock" and row["rms"]:
                    bound = FACTOR * float(row["rms"]), FACTOR * float(row["p999"])
                    bounds[run.measure, case["name"]] = bound
            continue
        if clock.left() < ENGINE_SECONDS:
            left_out.append(run.name)
            continue
        environment = {"VLLM_USE_V2_MODEL_RUNNER": "1" if run.runner == "v2" else "0"}
        spec = make_spec(run, model, measured)
        if run.system_kv:
            try:
                give_system_kvs(spec, folder, max(clock.left(), 0))
            except EngineFailed as error:
                journal.add(run.name, {}, describe(error))
                continue
        rows = rows_of(spec, folder, run.name.replace(" ", "-"), clock, environment)

        def shared(case: Row, row: Row, run: Run = run) -> Row:
            return {
                "model": run.model or "llama",
                "kv_cache": run.kv_cache,
                "system_kv": "yes" if run.system_kv else "",
                "system": run.system,
                "relay_config": json.dumps(dict(run.relay)) if run.relay else "",
                "runner": run.runner,
                "cudagraph_mode": row["cudagraph_mode"],
                "dtype": run.dtype,
                "requests": case["requests"],
                "groups": case["groups"],
                "steps": len(case["force"][0]),
            }

        def columns(case: Row, row: Row, run: Run = run) -> Row:
            key = run.measure, case["name"]
            if run.system != "stock" and key not in bounds:
                raise Wrong("stock has no result to be held against")
            bound = None if run.system == "stock" else bounds[key]
            true = {**row, "logprobs": row["exact"]} if run.drafts else exact[case["name"]]
            judged = judge(run, case, row, true, bound)
            if bound is None:
                rms, p999 = distances(row, true)
                bounds[key] = FACTOR * rms, FACTOR * p999
            return judged

        left_out += record(rows, measured, run.name, journal, shared, columns)
    return left_out


def run(journal: Journal, clock: Clock, chosen: Callable[[str], bool], quick: bool) -> list[str]:
    """The part. `chosen` is asked for each engine; its measure runs, too."""
    picked = [run for run in RUNS[: 2 if quick else None] if chosen(run.name)]
    picked = [run for run in RUNS if run in picked or run in {each.measure for each in picked}]
    steps = QUICK_STEPS if quick else STEPS
    left_out = []
    for name in dict.fromkeys(run.model for run in picked):
        mixes = FEW_MIXES if quick or name else MIXES
        cases = [make_case(*mix, steps=steps) for mix in mixes]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if name:
                architecture = ARCHITECTURES[name]
                model = write_model(folder / "model", architecture(), peak=architecture.peak)
            else:
                model = write_random_model(folder / "model", 8, 2, 128)
            runs = [run for run in picked if run.model == name]
            left_out += run_all(runs, cases, model, folder, journal, clock)
    return left_out
