"""Parity of small models of many architectures, and docs/models.md.

    python -m tests.engine.models [NAME ...]

A row per architecture in benchmarks/results/models.csv. What this revision has there is skipped: a
run that was ended goes on. The page is written once it has all.
"""

import sys
from collections import Counter
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks.harness.architectures import ARCHITECTURES
from benchmarks.harness.environment import RESULTS, ROOT
from benchmarks.harness.random_model import write_model
from benchmarks.harness.result_csv import Row, read, revision, run_chunks, source
from tests.engine.parity import Case, Found, check

CSV = RESULTS / "models.csv"
PAGE = ROOT / "docs" / "models.md"
CODE = ("vllm_relay", "tests/engine", "benchmarks/harness")
HEAD = """# Models

Small models of each architecture, random weights, on the real CPU engine. Requests of three shared
prefixes and ungrouped ones are given the same tokens in runs by vLLM and by relay, those of an fp32
run, with which log-probabilities are compared. **Distance** is that of relay's bf16 run over that
of vLLM's own bf16 run, the larger one of root mean square and 99.9th percentile: about 1 is as
exact as vLLM, 2 is the bound of the tests. **fp32** is the distance of relay's own fp32 run on the
same scale, its bound 0.02. A layer is listed if it keeps KV or a state.

`vllm-relay doctor MODEL` says the same of your model, with your options.
"""
NOTES = """
Engine limits: Qwen3-Next runs in bf16 only, so transformers computes its fp32 run, of the tokens
that vLLM's own run chose. Mamba-2 layers (Granite 4, Falcon-H1, Nemotron-H) fail with prefix
caching, by vLLM and relay, if a prompt's chunk goes past the last state that vLLM keeps; here
prefixes are multiples of that distance and `--max-num-batched-tokens` is 128.
"""
# Mamba-2's scan on CPUs has no states but a chunk's last (vLLM 0.32).
_SHORT_CHUNKS: dict[str, Any] = {
    "groups": ((512, 14, 60), (512, 10, 60), (256, 8, 60)),
    "ungrouped": (60, 65, 70, 75, 80),
    "engine": {"max_num_batched_tokens": 128},
}
CASES: dict[str, dict[str, Any]] = {
    "qwen-3-next": {"float32": False, "relayed": 2},
    "granite-4": {**_SHORT_CHUNKS, "relayed": 1},
    "falcon-h1": {**_SHORT_CHUNKS, "relayed": 4},
    "nemotron-h": {**_SHORT_CHUNKS, "relayed": 1},
    "lfm-2": {"relayed": 2},
    "llama-4": {"relayed": 1},
    "deepseek-v2": {"relayed": 0},
    "paligemma": {"engine": {"language_model_only": True}},
}

# Releases of vLLM whose own CPU attention, without relay, cannot run the case of an architecture.
NOT_SERVED = {
    "gpt-oss": (("0.27", "0.28", "0.29", "0.30"), "sinks are not converted to float32"),
    "gemma-4": (("0.27",), "its head sizes are not read from transformers' configuration"),
    "qwen-3-next": (("0.27", "0.28"), "gated-delta layers with states of another dtype"),
    "granite-4": (("0.27", "0.29", "0.30", "0.31"), "Mamba layers in float32"),
    "gemma-3n": (("0.27", "0.28", "0.29"), "layers that share KV have no weights of their own"),
}


def skip_where_not_served(name: str) -> None:
    """Skip a test of an architecture that this release of vLLM does not run without relay."""
    releases, reason = NOT_SERVED.get(name, ((), ""))
    if version("vllm").startswith(tuple(f"{release}." for release in releases)):
        pytest.skip(f"vLLM {version('vllm')} does not run {name}: {reason}")


def check_model(name: str, folder: Path, planted: tuple[str, ...] = ()) -> Found:
    """`parity.check` of an architecture; a group that misses a block is always planted.

    Args:
        planted: errors in its fp32 run.
    """
    skip_where_not_served(name)
    architecture, case = ARCHITECTURES[name], CASES.get(name, {})
    return check(
        Case(
            write=lambda path: write_model(path, architecture(), peak=architecture.peak),
            bf16=() if case.get("relayed") == 0 else ("block",),
            fp32=planted,
            **case,
        ),
        folder,
    )


def _row(names: list[str], index: int) -> Row:
    name = names[index]
    with TemporaryDirectory() as folder:
        found = check_model(name, Path(folder))
    left = Counter(f"{x['kind']}: {x['reason']}" for x in found.layers if x["reason"])
    return {
        "model": name,
        "class": type(ARCHITECTURES[name]()).__name__,
        "layers": len(found.layers),
        "relayed": sum(x["reason"] is None for x in found.layers),
        "left": "; ".join(f"{count} x {why}" for why, count in left.items()),
        "bf16": round(found.bf16, 2),
        "fp32": "" if found.fp32 is None else float(f"{found.fp32:.2g}"),
    }


def page(rows: list[Row]) -> str:
    """The text of docs/models.md."""
    last = rows[-1]
    lines = [
        HEAD,
        f"{len(rows)} architectures, {last['device']}, vLLM {last['vllm']}, transformers "
        f"configurations, {last['date'][:10]} ([CSV](../benchmarks/results/models.csv), made by "
        "`make test-models`):",
        "",
        "| model | attention | layers | relayed | left to vLLM | distance | fp32 |",
        "|---|---|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        kind = ARCHITECTURES[row["model"]].layers
        cells = (row[key] for key in ("layers", "relayed", "left", "bf16", "fp32"))
        title = f"{row['model']} (`{row['class'].removesuffix('Config')}`)"
        lines.append("| " + " | ".join(map(str, (title, kind, *cells))) + " |")
    return "\n".join([*lines, NOTES])


def main() -> int:
    names, failed = list(ARCHITECTURES), []
    if unknown := [name for name in sys.argv[1:] if name not in names]:
        sys.exit(f"models: unknown {', '.join(unknown)}; known: {', '.join(names)}")
    columns = source() | {"revision": revision(*CODE)}
    for name in sys.argv[1:] or names:
        index = names.index(name)
        try:
            run_chunks(CSV, partial(_row, names), range(index, index + 1), columns)
        except AssertionError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    if failed:
        sys.exit(f"models: {', '.join(failed)} failed")
    rows = [row for row in read(CSV) if row["revision"] == columns["revision"]]
    if len(rows) == len(names):
        PAGE.write_text(page(sorted(rows, key=lambda row: row["chunk"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
