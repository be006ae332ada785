"""Context attention in plain torch and float32, block by block; runs on any device.

Every (chunk of queries, block) pair is attended apart and merged by its LSE, so rows of any length
share batched products. Scores are never rounded below float32.
"""

import torch
from torch import Tensor

from vllm_relay.ops.context_plan import ContextBatch, ContextPlan

# Float32 copy of the blocks in work: stays in a core's L2.
_SCRATCH_BYTES = 1 << 20


def run_context(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: ContextPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """`context_attention` of a planned step; shapes are checked there."""
    out = q.new_zeros(q.shape)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    if not plan.batches:
        return out, lse
    _, block_size, kv_heads, head_size = k_cache.shape
    piece = max(1, _SCRATCH_BYTES // (4 * block_size * kv_heads * head_size))
    piece = min(piece, max(len(batch.blocks) for batch in plan.batches))
    k_scratch, v_scratch = _scratch(k_cache, piece), _scratch(v_cache, piece)
    for batch in plan.batches:
        batch_out, batch_lse = _attend(q, k_cache, v_cache, batch, scale, k_scratch, v_scratch)
        out.index_copy_(0, batch.tokens, batch_out)
        lse.index_copy_(1, batch.tokens, batch_lse)
    return out, lse


def _scratch(cache: Tensor, piece: int) -> Tensor:
    """[piece, block_size, Hkv, D] float32, head by head, each in the cache's own orientation."""
    _, block_size, heads, head_size = cache.shape
    # Turning a block while copying costs more than the product that follows.
    if cache.stride(1) < cache.stride(3):
        turned = cache.new_empty((piece, heads, head_size, block_size), dtype=torch.float32)
        return turned.permute(0, 3, 1, 2)
    straight = cache.new_empty((piece, heads, block_size, head_size), dtype=torch.float32)
    return straight.transpose(1, 2)


def _stage(scratch: Tensor, cache: Tensor, blocks: list[int]) -> Tensor:
    staged = scratch[: len(blocks)]
    if cache.device.type == "cpu":
        # Indexing with a list walks element by element; a copy per block runs at memory speed.
        for slot, block in enumerate(blocks):
            staged[slot].copy_(cache[block])
        return staged
    return staged.copy_(cache[torch.tensor(blocks, device=cache.device)])


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: ContextBatch,
    scale: float,
    k_scratch: Tensor,
    v_scratch: Tensor,
) -> tuple[Tensor, Tensor]:
    """out [chunks * n, Hq, D] and lse [Hq, chunks * n] of one batch."""
    _, block_size, kv_heads, head_size = k_cache.shape
    n, count = batch.queries, len(batch.blocks)
    chunks = batch.tokens.numel() // n
    # [chunks, Hkv, g * n, D]
    rows = q[batch.tokens].view(chunks, n, kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(chunks, kv_heads, -1, head_size).float() * scale
    per_head = rows.shape[2]
    outs = rows.new_empty((count, kv_heads, per_head, head_size))
    peaks = rows.new_empty((count, kv_heads, per_head))
    lses = rows.new_full((count + 1, kv_heads, per_head), -torch.inf)
    for start in range(0, count, k_scratch.shape[0]):
        part = slice(start, min(start + k_scratch.shape[0], count))
        k = _stage(k_scratch, k_cache, batch.blocks[part])
        v = _stage(v_scratch, v_cache, batch.blocks[part])
        for slot, fill in enumerate(batch.fill[part]):
            if fill < block_size:
                # Beyond the context anything may lie, and NaN * 0 is NaN.
                v[slot, fill:] = 0
        scores = torch.bmm(
            rows[batch.chunk[part]].flatten(0, 1), k.permute(0, 2, 3, 1).flatten(0, 1)
        )
        if batch.hidden is not None:
            by_query = scores.view(-1, kv_heads, per_head // n, n, block_size)
            by_query.masked_fill_(batch.hidden[part], -torch.inf)
        # A query that sees none of the block: a finite peak makes its weights exp(-inf) = 0.
        peak = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
        weights = scores.sub_(peak).exp_()
        torch.bmm(weights, v.transpose(1, 2).flatten(0, 1), out=outs[part].flatten(0, 1))
        peaks[part] = peak.view(-1, kv_heads, per_head)
        lses[part] = peaks[part] + weights.sum(-1).log_().view(-1, kv_heads, per_head)
    lse = torch.logsumexp(lses[batch.pairs], 1)
    outs *= torch.exp(peaks - lse[batch.chunk]).unsqueeze(-1)
    out = torch.zeros_like(rows).index_add_(0, batch.chunk, outs)
    out = out.view(chunks, kv_heads, -1, n, head_size).permute(0, 3, 1, 2, 4)
    lse = lse.view(chunks, kv_heads, -1, n).permute(1, 2, 0, 3)
    return out.reshape(chunks * n, -1, head_size).to(q.dtype), lse.reshape(-1, chunks * n)
