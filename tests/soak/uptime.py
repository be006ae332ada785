"""Uptime: what a CPU engine with relay keeps as its steps go by.

One process, one engine of a small random model, a system KV loaded. Requests come and go, most of
them under prefixes that several share and that change; some are aborted. Every `ROUND` steps all
have ended, and the prefix cache is reset. Readings are taken in such pauses: after the warm-up,
and at the end.

Failures: the resident memory has grown by `GROWTH` bytes or more; there are more file descriptors,
threads or metric series than after the warm-up; relay has logged more than a line per minute, or
one on failures; fewer than half of the steps were relayed; steps fell back to vLLM's own attention.

    python -m tests.soak --part uptime
"""

import ctypes
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from prometheus_client import REGISTRY
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.harness import random_model
from tests.engine.engine import environment
from tests.engine.system_kv import build
from vllm_relay import metrics
from vllm_relay.backend.packed_cache import Segment
from vllm_relay.sharing import Costs
from vllm_relay.sharing.cost_store import Constants
from vllm_relay.sharing.planner import Planner

CHUNKS = 1
WARMUP, STEPS = 10_000, 100_000
GROWTH = 1_000_000
ROUND = 500
BLOCK, VOCABULARY = 32, 2048


def run_chunk(chunk: int) -> dict[str, Any]:
    """The soak's row: steps after a warm-up, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), WARMUP, STEPS, seed=chunk)
    return {**found, "failures": len(failures(found))}


def failures(found: dict[str, Any], growth: int = GROWTH) -> list[str]:
    """What is wrong with the readings of a run, in words."""
    wrong = [name for name in ("fds", "threads", "series") if found[f"{name}_more"] > 0]
    if found["rss_growth_bytes"] >= growth:
        wrong.append(f"memory grew by {found['rss_growth_bytes']:,} bytes")
    if found["log_lines"] > 1 + found["measured_s"] / 60:
        wrong.append(f"{found['log_lines']} lines in the log")
    if found["relayed"] * 2 < found["steps"]:
        wrong.append(f"{found['relayed']} steps relayed")
    if found["fallbacks"]:
        wrong.append(f"{found['fallbacks']} fallbacks")
    return wrong


def measure(
    folder: Path,
    warmup: int,
    steps: int,
    *,
    seed: int = 0,
    stock: bool = False,
    small: bool = False,
) -> dict[str, Any]:
    """Readings of a run in a process of its own.

    Args:
        stock: vLLM's own attention. small: no system KV, and after the run as many steps again with
            each of `LEAKS`; their growth is in ``leaks``.
    """
    with mock.patch.object(random_model, "LAYERS", 1):
        model = random_model.write_random_model(folder / "model", 4, 2, 32)
    prompt, file = _tokens(Random(seed), 3 * BLOCK), folder / "system.relay"
    if not (stock or small):
        build(file, model, prompt, "--skip-tokenizer-init", "--max-model-len", "512")
    given = {"model": str(model), "warmup": warmup, "steps": steps, "seed": seed, "stock": stock}
    given |= {"system_kv": [str(file)] if file.exists() else [], "prompt": prompt, "small": small}
    result, log = folder / "result.json", folder / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak.uptime", json.dumps(given), result],
            env=environment(
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
                OMP_NUM_THREADS="1",
                # oneDNN keeps what it made for the last batch sizes, 1024 by default: until so many
                # were seen the process grows by 60 MB, with relay or without.
                ONEDNN_PRIMITIVE_CACHE_CAPACITY="16",
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
    return dict(json.loads(result.read_text()))


# In the process of the engine.


def _tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


class Load:
    """Requests of a run: prefixes that change, tails of their own, aborts."""

    def __init__(self, engine: Any, rng: Random, prompt: list[int]) -> None:
        self.engine, self.rng, self.prompt = engine, rng, prompt
        self.prefixes = [_tokens(rng, BLOCK * rng.randint(1, 4)) for _ in range(4)]
        self.live: list[str] = []
        self.made = 0

    def round(self) -> int:
        """Steps with requests coming and going, until all have ended; returns their number."""
        steps = 0
        while steps < ROUND or self.engine.has_unfinished_requests():
            if steps < ROUND - 50:
                self._change()
            for output in self.engine.step():
                if output.finished:
                    self.live.remove(output.request_id)
            steps += 1
        self.engine.reset_prefix_cache()
        return steps

    def _change(self) -> None:
        rng = self.rng
        if rng.random() < 0.02:
            self.prefixes[rng.randrange(4)] = _tokens(rng, BLOCK * rng.randint(1, 4))
        while len(self.live) < 6 or (len(self.live) < 12 and rng.random() < 0.3):
            prefix = rng.choice([*self.prefixes, self.prompt, []])
            params = SamplingParams(
                temperature=0, max_tokens=rng.randint(1, 40), ignore_eos=True, detokenize=False
            )
            name, self.made = str(self.made), self.made + 1
            prompt = [*prefix, *_tokens(rng, rng.randint(1, 40))]
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
            self.live.append(name)
        if rng.random() < 0.02:
            self.engine.abort_request([self.live.pop(rng.randrange(len(self.live)))])


class Lines(logging.Handler):
    """Counts what relay logs."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def _read() -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "series": sum(len(metric.samples) for metric in REGISTRY.collect()),
    }


_kept: list[Any] = []


@contextmanager
def _remembered_steps() -> Iterator[None]:
    """A planner that keeps something of every step."""
    stock = Planner.plan

    def plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        _kept.append(os.urandom(4096))
        return stock(self, *args, **kwargs)

    with mock.patch.object(Planner, "plan", plan):
        yield


@contextmanager
def _held_segments() -> Iterator[None]:
    """Packed segments that stay when they are dropped."""
    stock = Segment.layer

    def layer(self: Any, *args: Any) -> Any:
        found = stock(self, *args)
        _kept.append(found)
        return found

    with mock.patch.object(Segment, "layer", layer):
        yield


LEAKS = {"held segments": _held_segments, "remembered steps": _remembered_steps}


def _engine(given: dict[str, Any]) -> Any:
    relay = {
        "attention_backend": "relay",
        "additional_config": {
            "relay": {"min_saved_tokens": 0, "system_kv": given["system_kv"]},
        },
    }
    arguments = EngineArgs(
        model=given["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        block_size=BLOCK,
        max_num_seqs=16,
        num_gpu_blocks_override=64,
        enable_prefix_caching=True,
        disable_log_stats=False,
        distributed_executor_backend="uni",
        **({} if given["stock"] else relay),
    )
    return LLMEngine.from_engine_args(arguments)


def _rounds(load: Load, steps: int) -> int:
    done = 0
    while done < steps:
        done += load.round()
    return done


def _run(given: dict[str, Any]) -> dict[str, Any]:
    lines = Lines()
    costs = Constants.costs

    def with_free_copies(self: Constants, *shape: Any) -> Costs:
        return replace(costs(self, *shape), copy=0.0)  # short prefixes are packed, too

    with mock.patch.object(Constants, "costs", with_free_copies):
        load = Load(_engine(given), Random(given["seed"]), given["prompt"])
    warmup = _rounds(load, given["warmup"])
    before, counted = _read(), metrics.counters()
    metrics.logger.addHandler(lines)
    started = time.monotonic()
    steps = _rounds(load, given["steps"])
    after, found = _read(), metrics.counters()
    names = ("fds", "threads", "series")
    row = {
        "warmup": warmup,
        "steps": steps,
        "requests": load.made,
        "relayed": found["steps_relayed"] - counted["steps_relayed"],
        "fallbacks": found["fallbacks"],
        "rss_growth_bytes": after["rss"] - before["rss"],
        **{name: after[name] for name in names},
        **{f"{name}_more": after[name] - before[name] for name in names},
        "log_lines": lines.count,
        "measured_s": round(time.monotonic() - started),
    }
    if given["small"]:
        row["leaks"] = {}
        for name, leak in LEAKS.items():
            with leak():
                before = _read()
                _rounds(load, given["steps"])
                row["leaks"][name] = _read()["rss"] - before["rss"]
    return row


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_run(json.loads(sys.argv[1]))))
