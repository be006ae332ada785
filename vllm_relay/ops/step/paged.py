"""Relay attention of one layer over the paged KV cache, by a plan on the device.

Nothing here reads a device tensor on the host, and shapes depend on the batch's shape alone, so all
of it can be captured in a CUDA graph.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from vllm_relay.plan import DensePart, Part, Plan

# A variable-length attention with log-sum-exp, of (part, q, k_cache, v_cache, out): writes out
# [T, Hq, D] and returns LSE [Hq, T] float32; tokens of no sequence may stay unwritten in both.
# q is [T, Hq, D]; caches are [num_blocks, block_size, Hkv, D] for a `Part` and [tokens, Hkv, D]
# for a `DensePart`.
Attend = Callable[[Part[Tensor] | DensePart[Tensor], Tensor, Tensor, Tensor, Tensor], Tensor]


def paged_relay(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan[Tensor],
    attend: Attend,
    *,
    out: Tensor,
    side: "torch.cuda.Stream | None" = None,
) -> Tensor:
    """Attention of every request to its segments and its context.

    Context attention serves all requests in the batch's order, straight into ``out``; ungrouped
    requests are then done. Per level, the queries of grouped requests are gathered and attend to
    their segments; relay fusion merges these partials into ``out``.

    Args:
        q: [T, Hq, D], tokens of padding included.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], as ``attend`` takes them; blocks are
            consecutive in memory if there is a dense group (else RuntimeError).
        plan: from `DevicePlan.update`.
        attend: computes each part.
        out: [T, Hq, D], bf16, fp16 or fp32; written in place and returned.
        side: a stream for system attention, beside context attention; nothing else may use it.
    """
    # Imported here: triton is absent or useless where there is no GPU.
    from vllm_relay.ops.fusion.triton import merge_into
    from vllm_relay.ops.step.gather import gather_rows

    if side is not None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
    # Tensors allocated on the side stream return to its pool; the next to take them has waited for
    # the main stream, which reads them last.
    with nullcontext() if side is None else torch.cuda.stream(side):
        outs = [torch.empty_like(out) for _ in range(plan.index.shape[0])]
        queries = gather_rows(q, plan.index)
        lses = [
            attend(part, queries[level], k_cache, v_cache, outs[level])
            for level, part in enumerate(plan.levels)
        ]
        if plan.dense is not None:
            k, v = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
            lses.append(attend(plan.dense, queries[-1], k, v, outs[-1]))
    lse = attend(plan.context, q, k_cache, v_cache, out)
    if side is not None:
        main.wait_stream(side)
    return merge_into(out, lse, outs, lses, plan.index)
