"""Inputs of the kernels on the device: paged batches, and their exact answers in float64."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu.timing import DecodeStep
from vllm_relay.ops import reference

BLOCK = 16


@dataclass
class Batch:
    """Decode rows over a paged KV cache laid out as vLLM's: K and V side by side in a block.

    Attributes:
        q: [B, Hq, D]. k_cache, v_cache: [blocks, block_size, Hkv, D], views of one tensor.
        block_table: [B, M] int32. seq_lens: [B] int32. query_start_loc: [B + 1] int32.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    @property
    def longest(self) -> int:
        """Upper bound of seq_lens, from the shape alone."""
        return self.block_table.shape[1] * self.k_cache.shape[1]

    def exact(self) -> tuple[Tensor, Tensor]:
        """Attention in float64, row by row: out [B, Hq, D], lse [Hq, B]."""
        return reference.context_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
        )


def shared_batch(shape: DecodeStep, device: str = "cuda", seed: int = 0) -> Batch:
    """The batch of a `DecodeStep` in bf16, its blocks in a random order in memory."""
    generator = torch.Generator(device).manual_seed(seed)
    prefix, own = shape.shared // BLOCK, -(-shape.own // BLOCK)
    blocks = 1 + prefix + shape.batch * own  # block 0 is vLLM's null block
    cache = torch.randn(
        (blocks, BLOCK, shape.kv_heads, 2 * shape.head_size),
        generator=generator,
        device=device,
        dtype=torch.bfloat16,
    )
    ids = 1 + torch.randperm(blocks - 1, generator=generator, device=device).int()
    table = torch.cat(
        [ids[:prefix].expand(shape.batch, prefix), ids[prefix:].view(shape.batch, own)], 1
    )
    return Batch(
        # Scores then have a deviation of 1.4: attention neither uniform nor on one token.
        q=torch.randn(
            (shape.batch, shape.query_heads, shape.head_size),
            generator=generator,
            device=device,
            dtype=torch.bfloat16,
        )
        * 1.4,
        k_cache=cache[..., : shape.head_size],
        v_cache=cache[..., shape.head_size :],
        block_table=table.contiguous(),
        seq_lens=torch.full(
            (shape.batch,), shape.shared + shape.own, device=device, dtype=torch.int32
        ),
        query_start_loc=torch.arange(shape.batch + 1, device=device, dtype=torch.int32),
    )


def shared_in_a_row(batch: Batch, shape: DecodeStep) -> Batch:
    """The same batch with the shared blocks one after another in memory, as pinned ones are."""
    shared = batch.block_table[0, : shape.shared // BLOCK].long()
    blocks = torch.arange(len(batch.k_cache), device=batch.q.device)
    order = torch.cat([blocks[:1], shared, blocks[1:][~torch.isin(blocks[1:], shared)]])
    cache = torch.cat([batch.k_cache, batch.v_cache], -1)[order]
    k_cache, v_cache = cache.split(shape.head_size, -1)
    # Where a block went is the inverse of where it is taken from.
    table = torch.argsort(order)[batch.block_table.long()].int()
    return replace(batch, k_cache=k_cache, v_cache=v_cache, block_table=table)


@dataclass
class Tables:
    """Block tables of groups and loners, and what a plan of them must find.

    Attributes:
        block_table: [R, M] int32. seq_lens: [R] int32. blocks: ids are below it.
        groups: groups of at least two. saved: KV tokens that they need not read again.
    """

    block_table: Tensor
    seq_lens: Tensor
    blocks: int
    groups: int
    saved: int


def forest_tables(
    rows: int, columns: int, groups: int, device: str = "cuda", seed: int = 0
) -> Tables:
    """Groups of different depths, every fifth row a loner, all in a random order.

    Args:
        columns: blocks of the longest possible row. groups: 0 for loners only.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    table = torch.zeros(rows, columns, dtype=torch.int32)
    lens = torch.zeros(rows, dtype=torch.int32)
    taken = 1  # block 0 is vLLM's null block

    def take(count: int) -> Tensor:
        nonlocal taken
        taken += count
        return torch.arange(taken - count, taken, dtype=torch.int32)

    prefixes = [take(draw(1, max(1, columns // 2))) for _ in range(groups)]
    members = [0] * groups
    for i, row in enumerate(torch.randperm(rows, generator=generator).tolist()):
        loner = groups == 0 or i % 5 == 0
        prefix = table[row, :0] if loner else prefixes[i % groups]
        own = take(draw(1, min(columns - len(prefix), 64)))
        blocks = torch.cat([prefix, own])
        table[row, : len(blocks)] = blocks
        lens[row] = len(blocks) * BLOCK - draw(0, BLOCK - 1)
        if not loner:
            members[i % groups] += 1
    found = [(m, len(p)) for m, p in zip(members, prefixes, strict=True) if m > 1]
    saved = sum((m - 1) * depth * BLOCK for m, depth in found)
    return Tables(table.to(device), lens.to(device), taken, len(found), saved)


def errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest and root mean square difference; infinite where `got` is not finite."""
    difference = (got.double() - exact).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(difference.max()), float(difference.square().mean().sqrt())


def agrees(got: Tensor, stock: Tensor, exact: Tensor) -> bool:
    """`got` is at most twice as far from `exact` as `stock` is, in both measures of `errors`.

    Plus one rounding of a partial that was stored in got's dtype; of `stock` itself is asked
    that its root mean square error is below a 128th of the result's.
    """
    (worst, rms), (stock_worst, stock_rms) = errors(got, exact), errors(stock, exact)
    size = float(exact.square().mean().sqrt())
    rounding = torch.finfo(got.dtype).eps / 2 * float(exact.abs().max())
    sound = stock_rms <= size / 128
    return sound and worst <= 2 * stock_worst + rounding and rms <= 2 * stock_rms
