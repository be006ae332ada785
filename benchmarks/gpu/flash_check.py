"""FlashAttention as relay calls it, output and LSE against float64."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.batches import BLOCK, Batch, errors
from benchmarks.gpu.flash import attend_with, flash_attention
from benchmarks.gpu.journal import Row, Wrong
from vllm_relay.ops.reference import attention_lse


def varlen(version: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Row:
    """FlashAttention as relay calls it, output and LSE against float64.

    Paged, ragged, causal and grouped with an empty row; then a long unmasked prefix.
    """
    function = flash_attention(version)
    batch = ragged_batch([700, 33, 1, 2048, 0], dtype, device)
    out = torch.full_like(batch.q, float("nan"))
    attend = attend_with(function)
    lse = attend(context_part(batch), batch.q, batch.k_cache, batch.v_cache, out)
    exact, exact_lse = batch.exact()
    worst = check_partial("context", out, lse, exact, exact_lse)

    one = ragged_batch([4096], dtype, device, tokens=64)
    out = torch.full_like(one.q, float("nan"))
    lse = attend(prefix_part(one), one.q, one.k_cache, one.v_cache, out)
    k, v = (c[one.block_table[0].long()].flatten(0, 1) for c in (one.k_cache, one.v_cache))
    worst = max(worst, check_partial("system", out, lse, *attention_lse(one.q, k, v)))
    return {"error": f"{worst:.3g}", "correct": "yes"}


def ragged_batch(
    lens: list[int], dtype: torch.dtype, device: str, tokens: int | None = None
) -> Batch:
    """Rows of these lengths over shuffled blocks; `tokens` queries in all if not one per row."""
    columns = -(-max(lens) // BLOCK)
    heads, kv_heads, size = 32, 8, 128
    generator = torch.Generator(device).manual_seed(0)
    shape = (1 + len(lens) * columns, BLOCK, kv_heads, 2 * size)
    cache = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    ids = 1 + torch.randperm(shape[0] - 1, generator=generator, device=device).int()
    count = len(lens) if tokens is None else tokens
    starts = torch.arange(count + 1) if tokens is None else torch.tensor([0, count])
    q = torch.randn((count, heads, size), generator=generator, device=device, dtype=dtype)
    return Batch(
        q=q,
        k_cache=cache[..., :size],
        v_cache=cache[..., size:],
        block_table=ids.view(len(lens), columns),
        seq_lens=torch.tensor(lens, device=device, dtype=torch.int32),
        query_start_loc=starts.to(device, torch.int32),
    )


def context_part(batch: Batch) -> Any:
    from vllm_relay.plan import Part

    return Part(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        max_query_len=1,
        max_seq_len=batch.longest,
        causal=True,
    )


def prefix_part(batch: Batch) -> Any:
    return replace(context_part(batch), max_query_len=len(batch.q), causal=False)


def check_partial(name: str, out: Tensor, lse: Tensor, exact: Tensor, exact_lse: Tensor) -> float:
    """Largest error of a partial; Wrong if it is not one. FA2's +inf stands for -inf."""
    if lse.shape != exact_lse.shape or lse.dtype != torch.float32:
        raise Wrong(f"{name}: lse is {tuple(lse.shape)} {lse.dtype}")
    empty = torch.isneginf(exact_lse)
    if not torch.equal(torch.isinf(lse), empty):
        raise Wrong(f"{name}: lse is infinite elsewhere than for empty rows")
    lse_error, _ = errors(lse[~empty], exact_lse[~empty])
    seen = ~empty.T[..., None]
    error, rms = errors(torch.where(seen, out, 0), exact)
    if lse_error > 1e-2 or rms > float(exact.square().mean().sqrt()) / 128:
        raise Wrong(f"{name}: rms error of out {rms:.3g}, largest of lse {lse_error:.3g}")
    return max(error, lse_error)
