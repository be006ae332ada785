"""Fail the n-th in one vLLM engine: ``run_failures.py SPEC.json RESULT.json``.

SPEC: ``engine`` (arguments of `vllm.LLM`, with a system KV), ``schedules`` (for each seam, lists of
prompts and steps), ``runs`` (seam, n, and a fault of `FAULTS` or null). RESULT: ``runs``, for each
the calls of the seam and what was wrong, or null; fewer runs if the engine died. ``difference``:
the largest in log-probability.
"""

import json
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from tests.soak.seams import Failure, planted
from vllm_relay import metrics
from vllm_relay.backend.cpu_impl import RelayMetadata
from vllm_relay.backend.fallback import Fallback
from vllm_relay.system_kv.placement import pinned_ids

# Largest difference in log-probability from stock's, in fp32. Rounding makes 1.2e-5.
LIMIT = 1e-4


class Lines(logging.Handler):
    """relay's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Engine:
    """An engine in this process, put back to its beginning before each run."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.llm = LLM(**spec["engine"], enforce_eager=True, disable_log_stats=True, seed=0)
        torch.set_num_threads(1)  # on a busy machine several wait for one another
        self.schedules = spec["schedules"]
        core = self.llm.llm_engine.engine_core.engine_core
        context = core.vllm_config.compilation_config.static_forward_context
        self.impls = [layer.impl for layer in context.values()]
        self.builder = self.impls[0].failed.__self__
        self.planner = self.builder.planner
        self.pins = core.scheduler.get_kv_connector()._pins
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.writer = get_kv_transfer_group()._writer
        self.lines = Lines()
        metrics.logger.addHandler(self.lines)
        self.difference = 0.0
        self.stock: dict[str, Any] = {}
        for seam, schedule in self.schedules.items():
            same = [x for x in self.stock if self.schedules[x] == schedule]
            self.begin()
            self.builder.planner = None
            self.stock[seam] = self.stock[same[0]] if same else self.generate(seam)

    def begin(self) -> None:
        """Forget former failures; pin the system KV again if it was released."""
        self.lines.lines.clear()
        self.builder._fallback = Fallback()
        self.builder.planner = self.planner
        self.planner.packed.clear()
        self.planner.packed._regret = 0.0
        pins = self.pins
        if pins.released is None:
            return
        pool = pins._pool
        assert self.llm.reset_prefix_cache()
        free = pool.get_new_blocks(pool.get_num_free_blocks())
        wanted = pinned_ids(pins._placements)
        pins._blocks = sorted(
            (block for block in free if block.block_id in wanted), key=lambda x: x.block_id
        )
        pool.free_blocks([block for block in free if block.block_id not in wanted])
        pins.released, pins._written = None, pins._resets

    def generate(self, seam: str) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of a schedule's requests, each part after a reset."""
        outputs = []
        for part in self.schedules[seam]:
            assert self.llm.reset_prefix_cache()
            for prompts, steps in part:
                done = self.llm.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts],
                    SamplingParams(
                        temperature=0,
                        max_tokens=steps,
                        ignore_eos=True,
                        logprobs=1,
                        detokenize=False,
                    ),
                    use_tqdm=False,
                )
                outputs += [request.outputs[0] for request in done]
        return [
            (
                list(o.token_ids),
                [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)],
            )
            for o in outputs
        ]

    def run(self, seam: str, n: int, fault: str | None) -> tuple[int, str | None]:
        """Calls of the seam; what was wrong, or None. An exception is the engine's death."""
        self.begin()
        before = metrics.counters()["fallbacks"]
        with FAULTS[fault]() if fault else nullcontext(), planted(seam, n) as failure:
            answers = self.generate(seam)
        fallbacks = metrics.counters()["fallbacks"] - before
        return failure.calls, self._wrong(failure, self.stock[seam], answers, fallbacks)

    def _wrong(self, failure: Failure, stock: Any, answers: Any, fallbacks: int) -> str | None:
        if failure.n and failure.calls < failure.n:
            return f"{failure.calls} calls"
        if [tokens for tokens, _ in answers] != [tokens for tokens, _ in stock]:
            return "other tokens than stock's"
        difference = max(
            float(np.abs(np.subtract(ours, theirs)).max())
            for (_, ours), (_, theirs) in zip(answers, stock, strict=True)
        )
        self.difference = max(self.difference, difference)
        if not difference <= LIMIT:
            return f"log-probabilities differ by {difference:.2g}"
        lines, wanted = self.lines.lines, int(failure.n > 0)
        if len(lines) != wanted or any(failure.cause not in line for line in lines):
            return f"lines in the log: {lines}"
        if any(len(line.splitlines()) != 1 for line in lines):
            return f"more than one line: {lines}"
        return None if fallbacks == wanted else f"{fallbacks} fallbacks"


def _nothing_is_caught() -> Any:
    def failed(self: Any, doing: str, error: Exception) -> None:
        raise error

    return mock.patch.object(Fallback, "failed", failed)


def _nothing_is_answered() -> Any:
    stock = CPUAttentionBackendImpl.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # With the output among them, relay's own call; its sixth argument is the metadata.
        if len(args) == 7 and isinstance(args[5], RelayMetadata):
            return args[6]
        return stock(self, *args, **kwargs)

    return mock.patch.object(CPUAttentionBackendImpl, "forward", forward)


def _two_lines() -> Any:
    stock = Fallback._log

    def log(self: Any, message: str) -> None:
        stock(self, message)
        stock(self, f"{message} again")

    return mock.patch.object(Fallback, "_log", log)


FAULTS = {
    "nothing is answered": _nothing_is_answered,
    "two lines": _two_lines,
    "nothing is counted": lambda: mock.patch.object(metrics, "count_fallback", lambda doing: None),
    "nothing is caught": _nothing_is_caught,
}


def main(spec: dict[str, Any]) -> dict[str, Any]:
    engine, runs = Engine(spec), []
    for seam, n, fault in spec["runs"]:
        try:
            runs.append(engine.run(seam, n, fault))
        except Exception as error:
            runs.append((0, f"engine died: {error!r}"))
            break
    return {"runs": runs, "difference": engine.difference}


if __name__ == "__main__":
    spec_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(main(json.loads(spec_path.read_text()))))
