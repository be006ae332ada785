"""Copies simulation: packed segments of the real CPU backend against an adversarial engine.

The engine of `pool` runs without tensors of KV: a block's content is a number per write of a slot.
Metadata are vLLM's own, wrapped for fast prefill in half of the scenarios; builder, planner, policy
and packed cache are the real ones. Packing copies the numbers, and every read of a packed segment
is compared with the blocks that it stands for, after the writes of its step. A difference is a
stale read.

    python -m tests.soak --part copies
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

from tests.soak.copies_pool import Pool, Request
from tests.soak.copies_scenario import BLOCK_SIZE, COLUMNS, Scenario
from tests.unit.backend.cpu_bench import Bench, make_bench
from vllm_relay.backend import cpu, step_planner
from vllm_relay.backend.packed_cache import PackedCache, Segment
from vllm_relay.sharing import reads

CHUNKS = 100
STEPS_PER_CHUNK = 10_000
STEPS_PER_SCENARIO = 500
LAYER = "layer"
# Not in vLLM 0.27.
_HAS_MAX_LOGITS = "max_logits_per_req" in CommonAttentionMetadata.__dataclass_fields__


@dataclass
class Counts:
    """Steps; packed segments read, those of them packed in earlier steps; stale reads."""

    steps: int = 0
    uses: int = 0
    uses_of_kept: int = 0
    stale: int = 0


def run_chunk(chunk: int) -> dict[str, Any]:
    """The soak's row of one chunk; stale reads are ``failures``."""
    counts = simulate(chunk, STEPS_PER_CHUNK)
    return {
        "steps": counts.steps,
        "uses": counts.uses,
        "uses_of_kept": counts.uses_of_kept,
        "failures": counts.stale,
    }


def simulate(seed: int, steps: int, *, until_stale: bool = False) -> Counts:
    """What so many steps saw; fewer with ``until_stale``, which ends at the first stale read."""
    rng, counts = Random(seed), Counts()
    with mock.patch.object(step_planner, "NativeStep", RecordedStep):
        while counts.steps < steps and not (until_stale and counts.stale):
            engine = Engine(rng, counts)
            last = min(steps, counts.steps + STEPS_PER_SCENARIO)
            while counts.steps < last and not (until_stale and counts.stale):
                engine.step()
    return counts


class RecordedStep:
    """The arguments of `NativeStep` that say what is read packed."""

    def __init__(self, plan: Any, packed: list[bool], shape: Any) -> None:
        self.plan, self.packed = plan, packed

    def go_on(self, context: Any) -> None:
        self.plan = replace(self.plan, context=context)


class BrokenPlanner:
    """A planner that raises before it has seen the step's writes."""

    def __init__(self, packed: PackedCache) -> None:
        self.packed = packed

    def plan(self, common: Any) -> Any:
        raise RuntimeError("planted")


@cache
def _bench(fast: bool) -> Bench:
    backend = cpu.RelayBackend
    if fast:
        backend = create_fast_prefill_custom_backend("FastPrefill", backend)
    return make_bench(1, 1, 32, torch.float32, "vec", 1, backend)


class Engine:
    """One scenario: the pool, and the backend as a worker calls it."""

    def __init__(self, rng: Random, counts: Counts) -> None:
        self.rng, self.counts = rng, counts
        self.scenario = scenario = Scenario.draw(rng)
        self.pool = Pool(rng, scenario)
        bench = _bench(scenario.fast)
        self.builder, self.impl, self.layer = bench.builder, bench.impl, bench.layer
        packed = PackedCache(1, scenario.room)
        costs = replace(reads(), copy=scenario.copy)
        assert self.impl.shape is not None
        self.builder.planner = step_planner.StepPlanner(
            {self.impl.shape: costs}, BLOCK_SIZE, scenario.levels, packed
        )
        self.impl.packed, self.impl.pack = packed, self.pack
        # The worker's persistent block table: columns and rows not in use are stale.
        self.table = np.zeros((scenario.rows + 2, COLUMNS), dtype=np.int32)
        self.former: list[list[int]] = []  # blocks of the last system KVs
        # Blocks that no request of the last step held, so that a connector may write them.
        self.untouched = set(range(scenario.blocks))
        if rng.random() < 0.5:
            self._load()

    def step(self) -> None:
        """One pass and what happens before it."""
        self.counts.steps += 1
        self.pool.finish_some()
        self._between_passes()
        queries = self.pool.schedule()
        if not queries:
            return
        rows = list(queries)
        if self.rng.random() < 0.3:
            self.rng.shuffle(rows)
        common, slots = self._metadata(rows, queries)
        metadata = self._build(common)
        nodes = [
            node
            for request in rows
            for node in request.chain[request.computed : request.computed + queries[request]]
        ]
        self.pool.write(slots, nodes)
        self._check_engine(rows, queries)
        for relay in getattr(metadata, "relay", {}).values():
            self._read(relay)
        held = {block for request in rows for block in request.blocks}
        self.untouched = set(range(self.scenario.blocks)) - held
        self.pool.advance(queries)

    def _metadata(
        self, rows: list[Request], queries: dict[Request, int]
    ) -> tuple[CommonAttentionMetadata, np.ndarray]:
        """vLLM's metadata of a step, rows without a request at the end; and the slots written."""
        rng, padding = self.rng, self.rng.choice([0, 0, 1, 2])
        for row, request in enumerate([*rows, *[None] * padding]):
            blocks = request.blocks if request else []
            self.table[row, : len(blocks)] = blocks
            if self.former and rng.random() < 0.5:
                stale = rng.choice(self.former)[: COLUMNS - len(blocks)]
                self.table[row, len(blocks) : len(blocks) + len(stale)] = stale
        count = [queries[request] for request in rows]
        lens = [request.computed + n for request, n in zip(rows, count, strict=True)]
        starts = np.cumsum([0, *count, *[0] * padding], dtype=np.int32)
        slots = [
            request.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for request, end in zip(rows, lens, strict=True)
            for position in range(request.computed, end)
        ]
        # A draft's logits are wanted, a prompt's only at its end.
        logits = [
            n if request.known - request.computed == 1 else 1
            for request, n in zip(rows, count, strict=True)
        ]
        indices = [
            index
            for end, n in zip(starts[1:].tolist(), logits, strict=False)
            for index in range(end - n, end)
        ]
        common = CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=torch.tensor([*lens, *[0] * padding], dtype=torch.int32),
            num_reqs=len(rows) + padding,
            num_actual_tokens=len(slots),
            max_query_len=max(count),
            max_seq_len=max(lens),
            block_table_tensor=torch.from_numpy(self.table),
            slot_mapping=torch.tensor(slots + [-1] * rng.randint(0, 3)),
            causal=rng.random() > 0.01,
            logits_indices_padded=torch.tensor(indices + [0] * rng.randint(0, 2)),
            num_logits_indices=len(indices),
            **({"max_logits_per_req": max(logits)} if _HAS_MAX_LOGITS else {}),
        )
        return common, np.array(slots)

    def _build(self, common: CommonAttentionMetadata) -> Any:
        planner, fallback = self.builder.planner, self.builder._fallback
        broken = self.rng.random() < self.scenario.failures
        if broken:
            self.builder.planner = BrokenPlanner(planner.packed)
        metadata = self.builder.build(0, common)
        self.builder.planner = planner
        assert fallback.failures == broken, "a failure that was not planted"
        fallback.failures = 0  # never off
        return metadata

    def _read(self, relay: Any) -> None:
        """Read what the kernels would of packed segments, and compare."""
        segments = iter(relay.segments)
        step = relay.attention
        for blocks, packed in zip(_groups(step.plan), step.packed, strict=True):
            if not packed:
                continue
            segment, first = next(segments)
            kept = LAYER in segment._layers
            read = self.pack(None, None, segment)[first : first + len(blocks)]
            self.counts.uses += 1
            self.counts.uses_of_kept += kept
            self.counts.stale += not np.array_equal(read, self.pool.content[blocks])

    def pack(self, layer: Any, kv_cache: Any, segment: Segment) -> Any:
        """In the place of `RelayImpl.pack`: the content of the segment's blocks."""
        return segment.layer(LAYER, lambda block_ids: self.pool.content[block_ids])

    def _between_passes(self) -> None:
        """System KVs come and go, as the connector's `Writer` has it."""
        event, pool = self.rng.random(), self.pool
        if not pool.system and event < self.scenario.loads:
            self._load()
        elif pool.system and event < 0.1:
            self._unpin()
        elif event > 0.98:
            pool.reset()
            if pool.system and self.rng.random() < 0.5:
                self.impl.forget()
                self._keep(pool.rewrite())
            elif pool.system:
                self._unpin()

    def _load(self) -> None:
        self._keep(self.pool.load(self.untouched))

    def _keep(self, system: list[list[int]]) -> None:
        self.former = system or self.former
        for blocks in system:
            self.impl.keep(self.layer, None, blocks)

    def _unpin(self) -> None:
        self.impl.forget()
        self.pool.unpin()
        self.untouched = set()  # until a step has been planned without the pins

    def _check_engine(self, rows: list[Request], queries: dict[Request, int]) -> None:
        """The engine is right: one request's blocks hold its own tokens' KV."""
        request = self.rng.choice(rows)
        end = request.computed + queries[request]
        assert self.pool.chain[request.blocks].reshape(-1)[:end].tolist() == request.chain[:end]


def _groups(plan: Any) -> Iterator[np.ndarray]:
    """The blocks of each group's segment, level by level."""
    for part in plan.levels:
        for tokens, blocks in zip(part.seq_lens, part.block_table, strict=True):
            if tokens:
                yield blocks[: tokens // BLOCK_SIZE]
