"""Traces of requests: shortened for this machine, sent at a rate, and explained."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.engines import KV_BLOCK
from benchmarks.harness.environment import model_dtype
from vllm_relay.explain.trace import HASHED_BLOCK
from vllm_relay.serving.processes import beside_python

# A trace's tokens for one token here: its blocks of 512 become the CPU engine's.
SHORTENED = HASHED_BLOCK // KV_BLOCK


def read_shortened(path: Path, longest: int) -> tuple[list[dict[str, Any]], int]:
    """Rows with ``hash_ids``, as Mooncake's traces have them, in blocks of `KV_BLOCK` tokens.

    Returns:
        Requests of at most ``longest`` tokens, answers included, and the number of the others.

    Raises:
        ValueError: a line that is no such row; names it.
    """
    rows, left_out = [], 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            sizes = {x: -(-row[x] // SHORTENED) for x in ("input_length", "output_length")}
            kept = {"timestamp": row["timestamp"], "hash_ids": row["hash_ids"], **sizes}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from None
        if sum(sizes.values()) <= longest:
            rows.append(kept)
        else:
            left_out += 1
    return rows, left_out


def write_dataset(rows: Sequence[dict[str, Any]], path: Path, seconds: float) -> dict[str, Any]:
    """Write rows for ``vllm bench serve``; returns the options that send them in so many seconds.

    The distances of their timestamps keep their ratios.
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
    """JSON of `vllm-relay explain` for a log, with the CPU engine's blocks and levels.

    Raises:
        RuntimeError: the log is refused.
    """
    command = beside_python("vllm-relay", "explain", str(log), "--json", "--max-levels", "3")
    command += ["--block-tokens", str(KV_BLOCK), "--dtype", model_dtype()]
    command += map(str, options)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    found: dict[str, Any] = json.loads(done.stdout)
    return found
