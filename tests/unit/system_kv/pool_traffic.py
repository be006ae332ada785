"""Requests one after another against vLLM's real BlockPool, and synthetic traces of them."""

import hashlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool

from vllm_relay.system_kv.retention import Retention

Prompt = list[bytes]  # the hash of each full block


def chain(*parts: tuple[str, int]) -> Prompt:
    """Hashes of ``(name, blocks)`` parts one after another; equal beginnings have equal hashes."""
    hashes: Prompt = []
    last = b""
    for name, count in parts:
        for i in range(count):
            last = hashlib.sha256(last + f"{name} {i}".encode()).digest()
            hashes.append(last)
    return hashes


class Traffic:
    """A pool of ``blocks``, with retention if ``learn``; ``hits`` counts blocks found."""

    def __init__(self, blocks: int, learn: bool, budget: float = 0.5, groups: int = 1) -> None:
        self.pool = BlockPool(blocks + 1, True, hash_block_size=16)
        self.retention = Retention() if learn else None
        self.groups = list(range(groups))
        self.hits = 0
        if self.retention is not None:
            self.retention.attach(self.pool, int(budget * blocks), [16] * groups)

    def admit(self, prompt: Prompt) -> list[Any]:
        """The blocks of a new request, found or new, as vLLM's scheduler takes them."""
        if self.retention is not None:
            self.retention.begin_step()
        found: list[Any] = []
        for name in prompt:
            cached = self.pool.get_cached_block(name, self.groups)
            if cached is None:
                break
            found += cached
        self.pool.touch(found)
        self.hits += len(found)
        count = len(self.groups)
        new = self.pool.get_new_blocks(len(prompt) * count - len(found))
        request: Any = SimpleNamespace(block_hashes=prompt)
        for group in self.groups:
            self.pool.cache_full_blocks(
                request=request,
                blocks=(found + new)[group::count],
                num_cached_blocks=len(found) // count,
                num_full_blocks=len(prompt),
                block_size=16,
                kv_cache_group_id=group,
            )
        if self.retention is not None:
            self.retention.ask(prompt)
        return found + new

    def finish(self, blocks: list[Any]) -> None:
        self.pool.free_blocks(reversed(blocks))

    def free_ids(self) -> list[int]:
        """Ids of the free blocks, the next evicted first."""
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]


def tenants(requests: int, shift_every: int | None, seed: int, count: int = 40) -> Iterator[Prompt]:
    """Requests under ``count`` prompts of 5 to 15 blocks, popular by Zipf's law.

    Each adds 4 blocks of its own. Every ``shift_every`` requests popularity is dealt anew.
    """
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, count + 1)
    popularity /= popularity.sum()
    lengths = rng.integers(5, 16, count)
    order = rng.permutation(count)
    for i in range(requests):
        if shift_every and i and i % shift_every == 0:
            order = rng.permutation(count)
        tenant = order[rng.choice(count, p=popularity)]
        yield chain((f"tenant {tenant}", int(lengths[tenant])), (f"own {i}", 4))


def conversations(requests: int, seed: int) -> Iterator[Prompt]:
    """Turns of conversations, each longer by 4 blocks: 8 at a time, until each has ended."""
    rng = np.random.default_rng(seed)
    turns = dict.fromkeys(range(8), 0)
    for _ in range(requests):
        name = int(rng.choice(list(turns)))
        turns[name] += 1
        yield chain((f"conversation {name}", 4 * turns[name]))
        if turns[name] == 12 or rng.random() < 0.2:
            del turns[name]
            turns[max([name, *turns]) + 1] = 0
