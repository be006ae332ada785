"""Traces of requests: shortened for this machine, sent at a rate, and explained."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.engines import KV_BLOCK
from vllm_relay.explain.trace import HASHED_BLOCK
from vllm_relay.serving.processes import beside_python

# Tokens of a trace for one of ours: its blocks are then the CPU engine's.
SHORTENED = HASHED_BLOCK // KV_BLOCK


def read_shortened(path: Path, longest: int) -> list[dict[str, Any]]:
    """Rows with ``hash_ids``, as Mooncake's traces have them, of `KV_BLOCK` tokens each.

    Requests of more than ``longest`` tokens, the answer's with them, are left out.

    Raises:
        ValueError: a line that is no such row; names it.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            sizes = {x: max(1, row[x] // SHORTENED) for x in ("input_length", "output_length")}
            kept = {"timestamp": row["timestamp"], "hash_ids": row["hash_ids"], **sizes}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from None
        if sum(sizes.values()) <= longest:
            rows.append(kept)
    return rows


def dataset(rows: Sequence[dict[str, Any]], path: Path, seconds: float) -> dict[str, Any]:
    """Options of ``vllm bench serve`` that send these rows within so many seconds.

    The distances of their timestamps keep their ratios. ``path``: where they are written.
    """
    first = rows[0]["timestamp"]
    since = [{**row, "timestamp": row["timestamp"] - first} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in since))
    return {
        "dataset-name": "timed_trace",
        "dataset-path": path,
        "timed-trace-chunk-hash-size": KV_BLOCK,
        "timed-trace-sec-multiplier": seconds / max(since[-1]["timestamp"], 1),
    }


def explain(log: Path, *options: Any) -> dict[str, Any]:
    """What `vllm-relay explain` says of a log, with the CPU engine's blocks and levels."""
    command = beside_python("vllm-relay", "explain", str(log), "--json", "--max-levels", "3")
    command += ["--block-tokens", str(KV_BLOCK), *map(str, options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
