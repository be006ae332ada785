"""Habits of an adversarial engine, drawn at random."""

from dataclasses import dataclass
from random import Random

BLOCK_SIZE = 4
COLUMNS = 7
MAX_TOKENS = (COLUMNS - 1) * BLOCK_SIZE


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The habits of one engine.

    Attributes:
        order: of free blocks: "fifo" (vLLM's), "lifo", "column" (a block returns behind the block
            that it followed), or "random".
        zeroes: new blocks are zeroed. copies: partly filled blocks are copied.
        fast: vLLM's metadata wrapper for fast prefill.
        drafts: most draft tokens of a step. chunk: most prompt tokens of a step and request.
        room: packed blocks. copy: price of packing a token, in KV tokens read.
        loads, failures: chance per step that a system KV is loaded, and that planning fails.
    """

    blocks: int
    rows: int
    order: str
    zeroes: bool
    copies: bool
    fast: bool
    drafts: int
    chunk: int
    room: int
    levels: int
    copy: float
    loads: float
    failures: float

    @classmethod
    def draw(cls, rng: Random) -> "Scenario":
        return cls(
            blocks=rng.randint(8, 24),
            rows=rng.randint(2, 6),
            order=rng.choice(["fifo", "lifo", "column", "column", "random"]),
            zeroes=rng.random() < 0.5,
            copies=rng.random() < 0.5,
            fast=rng.random() < 0.5,
            drafts=rng.choice([0, 0, 2, 5]),
            chunk=rng.choice([3, 8, MAX_TOKENS]),
            room=rng.choice([2, 4, 12]),
            levels=rng.randint(1, 3),
            copy=rng.choice([0.0, 0.0, 0.5]),
            loads=rng.choice([0.0, 0.1, 0.5]),
            failures=rng.choice([0.0, 0.02, 0.1]),
        )
