"""A small model of vLLM's scheduler and block pool: real KV content, and the truth kept apart.

Like vLLM: full blocks are found again by all tokens up to their end, also by requests of the same
step and after their owner is gone; freed blocks keep their content until they are handed out again;
a request that finds no block preempts the youngest one; block table rows are reused with stale ids.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import torch

BLOCK_SIZE = 4
NUM_BLOCKS = 32  # too few for all requests: preemption and eviction are part of the game
MAX_COLUMNS = 14
MAX_RUNNING = 8
KV_HEADS, HEAD_SIZE = 1, 32
NULL_BLOCK = 0


@dataclass(eq=False)
class Request:
    """``keys`` and ``values`` are the truth, what attention must see: never read from the pool."""

    tokens: list[int]
    stop: int
    slot: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: torch.Tensor = field(default_factory=lambda: _empty_truth())
    values: torch.Tensor = field(default_factory=lambda: _empty_truth())


def _empty_truth() -> torch.Tensor:
    return torch.full((MAX_COLUMNS * BLOCK_SIZE, KV_HEADS, HEAD_SIZE), torch.nan)


@dataclass(frozen=True)
class Batch:
    """What one step hands to attention. Rows of padding have no request and length 0."""

    requests: list[Request | None]
    block_table: np.ndarray  # int32 [R, M], stale ids past each row's blocks
    query_lens: np.ndarray  # int32 [R]
    seq_lens: np.ndarray  # int32 [R], query tokens included


class SimulatedPool:
    """Call `step` again and again; ``seen`` counts what happened."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise = torch.Generator().manual_seed(seed)
        shape = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        self.key_cache = torch.full(shape, torch.nan)
        self.value_cache = torch.full(shape, torch.nan)
        self.table = self.rng.integers(
            1, NUM_BLOCKS, (MAX_RUNNING + 3, MAX_COLUMNS), dtype=np.int32
        )
        self.free = deque(range(NULL_BLOCK + 1, NUM_BLOCKS))
        self.references = [0] * NUM_BLOCKS
        self.block_of_prefix: dict[tuple[int, ...], int] = {}
        self.prefix_of_block: dict[int, tuple[int, ...]] = {}
        self.truth_of_block: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.seen: Counter[str] = Counter()
        tokens = iter(range(10**6, 2 * 10**6))
        trunks = [[next(tokens) for _ in range(n)] for n in (8, 13)]
        self.prompts = [
            *trunks,
            *(t + [next(tokens) for _ in range(n)] for t in trunks for n in (4, 9)),
        ]

    def step(self) -> Batch:
        """Finish, preempt, schedule and admit requests, write the new KV, lay out the batch."""
        if self.rng.random() < 0.01:
            self._drain()
        for request in list(self.running):
            if len(request.tokens) >= request.stop or self.rng.random() < 0.01:
                self._release(request)
                self.seen["finished"] += 1
        query_lens: dict[Request, int] = {}
        for request in list(self.running):
            if request in self.running:  # not preempted by an older one
                self._schedule_running(request, query_lens)
        if self.rng.random() < 0.8:
            self._admit(query_lens)
        return self._lay_out(query_lens)

    def _schedule_running(self, request: Request, query_lens: dict[Request, int]) -> None:
        if request.computed == len(request.tokens):  # decode; two tokens are a speculated one
            room = MAX_COLUMNS * BLOCK_SIZE - len(request.tokens)
            count = min(room, 1 + int(self.rng.random() < 0.1))
            request.tokens += self.rng.integers(0, 10**6, count).tolist()
        count = self._chunk(request)
        while not self._allocate(request, request.computed + count):
            victim = self.running[-1]
            self._release(victim)
            self.waiting.insert(0, victim)
            self.seen["preempted"] += 1
            if victim is request:
                return
        self._compute(request, count)
        query_lens[request] = count

    def _admit(self, query_lens: dict[Request, int]) -> None:
        while len(self.running) < MAX_RUNNING and self.rng.random() < 0.5:
            request = self.waiting.pop(0) if self.waiting else self._new_request()
            self._reuse_cached_blocks(request)
            count = self._chunk(request)
            if not self._allocate(request, request.computed + count):
                self._free_blocks(request)
                self.waiting.insert(0, request)
                return
            taken = {other.slot for other in self.running}
            request.slot = next(slot for slot in range(MAX_RUNNING) if slot not in taken)
            self.running.append(request)
            self._compute(request, count)
            query_lens[request] = count

    def _new_request(self) -> Request:
        if self.running and self.rng.random() < 0.3:
            tokens = list(self.running[self.rng.integers(len(self.running))].tokens)
            self.seen["duplicated"] += 1
        else:
            own = self.rng.integers(0, 10**6, self.rng.integers(1, 10)).tolist()
            tokens = self.prompts[self.rng.integers(len(self.prompts))] + own
        most = MAX_COLUMNS * BLOCK_SIZE
        tokens = tokens[: most - 1]
        return Request(tokens, stop=min(most, len(tokens) + int(self.rng.integers(1, 25))))

    def _chunk(self, request: Request) -> int:
        return min(len(request.tokens) - request.computed, int(self.rng.integers(6, 20)))

    def _reuse_cached_blocks(self, request: Request) -> None:
        # The last token is always computed: its logits are wanted.
        for end in range(BLOCK_SIZE, len(request.tokens), BLOCK_SIZE):
            block = self.block_of_prefix.get(tuple(request.tokens[:end]))
            if block is None:
                return
            if self.references[block] == 0:
                self.free.remove(block)
            self.references[block] += 1
            request.blocks.append(block)
            keys, values = self.truth_of_block[block]
            request.keys[end - BLOCK_SIZE : end] = keys
            request.values[end - BLOCK_SIZE : end] = values
            request.computed = end
            self.seen["hits"] += 1

    def _allocate(self, request: Request, tokens: int) -> bool:
        needed = -(-tokens // BLOCK_SIZE) - len(request.blocks)
        if needed > len(self.free):
            return False
        for _ in range(needed):
            block = self.free.popleft()
            prefix = self.prefix_of_block.pop(block, None)
            if prefix is not None:
                del self.block_of_prefix[prefix], self.truth_of_block[block]
                self.seen["evicted"] += 1
            self.references[block] = 1
            request.blocks.append(block)
        return True

    def _compute(self, request: Request, count: int) -> None:
        for position in range(request.computed, request.computed + count):
            block, slot = request.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            # New numbers even for tokens computed before: only the same block has the same content.
            for cache, truth in (
                (self.key_cache, request.keys),
                (self.value_cache, request.values),
            ):
                truth[position] = torch.randn((KV_HEADS, HEAD_SIZE), generator=self.noise)
                cache[block, slot] = truth[position]
            prefix = tuple(request.tokens[: position + 1])
            if slot == BLOCK_SIZE - 1 and prefix not in self.block_of_prefix:
                self.block_of_prefix[prefix], self.prefix_of_block[block] = block, prefix
                whole = slice(position + 1 - BLOCK_SIZE, position + 1)
                self.truth_of_block[block] = (
                    request.keys[whole].clone(),
                    request.values[whole].clone(),
                )
        request.computed += count

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
        request.blocks, request.computed = [], 0
        request.keys.fill_(torch.nan)
        request.values.fill_(torch.nan)

    def _drain(self) -> None:
        keep = int(self.rng.integers(0, 2))
        for request in self.running[keep:]:
            self._release(request)
        self.waiting.clear()

    def _lay_out(self, query_lens: dict[Request, int]) -> Batch:
        rows: list[Request | None] = [*query_lens, *([None] * int(self.rng.integers(0, 4)))]
        rows = [rows[i] for i in self.rng.permutation(len(rows))]
        for request in query_lens:
            self.table[request.slot, : len(request.blocks)] = request.blocks
        padding = iter(self.rng.permutation(len(self.table)))
        slots = [next(padding) if request is None else request.slot for request in rows]
        self.seen["padded"] += None in rows
        self.seen["no request"] += not query_lens
        self.seen["one request"] += len(query_lens) == 1
        self.seen["prefill"] += any(count > 2 for count in query_lens.values())
        return Batch(
            requests=rows,
            block_table=self.table[slots] if slots else self.table[:0],
            query_lens=np.array([query_lens.get(r, 0) if r else 0 for r in rows], dtype=np.int32),
            seq_lens=np.array([r.computed if r else 0 for r in rows], dtype=np.int32),
        )
