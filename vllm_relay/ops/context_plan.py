"""The plan of context attention: lengths and block tables to flat indices, once per step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vllm_relay.ops import checks

# Queries of one row attended at once: bounds the scores held in a long prefill.
_QUERY_CHUNK = 64
# (block, query) pairs per batch: bounds the float32 partials, 64 MiB at 32 heads of 128.
_PAIRS_PER_BATCH = 4096

# (first token of q, keys that its first query sees, blocks)
Chunk = tuple[int, int, list[int]]


@dataclass(frozen=True, slots=True)
class ContextBatch:
    """Chunks of n queries each, and the N (chunk, block) pairs that they attend to."""

    queries: int
    """n, queries per chunk."""
    tokens: Tensor
    """[chunks * n] int64: row of q."""
    blocks: list[int]
    """[N] physical block of each pair."""
    fill: list[int]
    """[N] tokens of that block which belong to the context."""
    chunk: Tensor
    """[N] int64: chunk of each pair."""
    pairs: Tensor
    """[chunks, most blocks] int64: pairs of each chunk, padded with N."""
    hidden: Tensor | None
    """[N, 1, 1, n, block_size] bool: keys that a query must not see; None where it sees all."""


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """What `run_context` needs to know of a step's lengths. Holds ids, never contents."""

    tokens: int
    batches: list[ContextBatch]


def plan_context(
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    *,
    num_blocks: int,
    block_size: int,
) -> ContextPlan:
    """Check a step's lengths and block ids; lay out its work. Arguments as `context_attention`."""
    device = block_table.device
    rows, columns = block_table.shape
    checks.integers("block_table", block_table, (rows, columns), "[R, M]", device)
    checks.integers("context_lens", context_lens, (rows,), "[R]", device)
    checks.integers("query_start_loc", query_start_loc, (rows + 1,), "[R + 1]", device)
    if block_size == 0:
        raise ValueError("k_cache: block_size is 0")
    context = checks.lengths("context_lens", context_lens, columns * block_size)
    starts: list[int] = query_start_loc.tolist()
    if starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
        raise ValueError("query_start_loc: expected 0 first and no decrease")
    used = -(-max(context, default=0) // block_size)
    table: list[list[int]] = block_table[:, :used].tolist()

    # Chunks with as many queries share their products.
    by_queries: dict[int, list[Chunk]] = {}
    for row, length in enumerate(context):
        ids = table[row][: -(-length // block_size)]
        if ids and not (min(ids) >= 0 and max(ids) < num_blocks):
            raise ValueError(f"block_table: row {row} names a block outside 0..{num_blocks - 1}")
        # Queries that would see no key stay at out 0, lse -inf.
        seeing = min(starts[row + 1] - starts[row], length)
        for first in range(0, seeing, _QUERY_CHUNK):
            n = min(_QUERY_CHUNK, seeing - first)
            seen = length - seeing + first + 1
            blocks = ids[: -(-(seen + n - 1) // block_size)]
            by_queries.setdefault(n, []).append((starts[row + 1] - seeing + first, seen, blocks))
    batches = [
        _lay_out(n, part, block_size, device)
        for n, chunks in by_queries.items()
        for part in _split(chunks, _PAIRS_PER_BATCH // n)
    ]
    return ContextPlan(starts[-1], batches)


def _split(chunks: list[Chunk], most: int) -> Iterator[list[Chunk]]:
    part: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if part and size + len(chunk[2]) > most:
            yield part
            part, size = [], 0
        part.append(chunk)
        size += len(chunk[2])
    yield part


def _lay_out(n: int, chunks: list[Chunk], block_size: int, device: torch.device) -> ContextBatch:
    tokens: list[int] = []
    blocks: list[int] = []
    fill, owner, seen_in_block, pairs = [], [], [], []
    for i, (first, seen, ids) in enumerate(chunks):
        tokens.extend(range(first, first + n))
        pairs.append(range(len(blocks), len(blocks) + len(ids)))
        blocks.extend(ids)
        owner.extend([i] * len(ids))
        for column in range(len(ids)):
            seen_in_block.append(seen - column * block_size)
            fill.append(min(block_size, seen_in_block[-1] + n - 1))
    most = max(len(p) for p in pairs)
    hidden = None
    if min(seen_in_block) < block_size:
        seen_by = torch.tensor(seen_in_block, device=device)[:, None] + torch.arange(
            n, device=device
        )
        hidden = torch.arange(block_size, device=device) >= seen_by[:, None, None, :, None]
    return ContextBatch(
        queries=n,
        tokens=torch.tensor(tokens, device=device),
        blocks=blocks,
        fill=fill,
        chunk=torch.tensor(owner, device=device),
        pairs=torch.tensor([[*p, *[len(blocks)] * (most - len(p))] for p in pairs], device=device),
        hidden=hidden,
    )
