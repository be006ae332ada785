"""Requests that have held their KV blocks since the last step, beside connectors that write KV.

A KV connector loads KV into blocks that a request has just been given, between passes and in none
of their slot mappings. vLLM's runner keeps the block ids of a request in one object, which it
extends; a request that was preempted gets another, a new request too. So a request whose object is
that of the last step was given no blocks but at the end of its own, and loaded nothing.

vllm-project/vllm#55847 brings runner V2 to CPUs. It has no list of block ids per request, so this
module then needs another source; its tables and lengths lie in the engine's memory as V1's do.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Runner(Protocol):
    """vLLM's model runner: ``requests`` by id, each with ``block_ids``; ``input_batch.req_ids``."""

    requests: Any
    input_batch: Any


class Continuity:
    """Follows the requests of a runner's steps, see the module's first lines."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._held: dict[str, Any] = {}

    def new_rows(self, count: int) -> NDArray[np.bool_]:
        """``[count]``: rows of this step whose blocks may have been loaded since the last step."""
        ids = self._runner.input_batch.req_ids[:count]
        held = {request: self._runner.requests[request].block_ids for request in ids}
        new = np.ones(count, bool)
        new[: len(ids)] = [self._held.get(name) is not blocks for name, blocks in held.items()]
        # Those that a step leaves out hold their blocks, too: a pipeline's batches take turns.
        running = self._runner.requests
        self._held = {name: self._held[name] for name in self._held if name in running} | held
        return new


def continuity(runner: Any) -> Continuity | None:
    """None where the runner does not keep its requests in this way (vLLM's runner V2)."""
    known = hasattr(runner, "requests") and hasattr(
        getattr(runner, "input_batch", None), "req_id_to_index"
    )
    return Continuity(runner) if known else None
