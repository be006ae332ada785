"""Relay attention over a paged cache by a plan on the device: what a backend runs per layer.

Nothing here reads a device tensor on the host, and shapes depend on the batch's shape alone, so all
of it can be captured in a CUDA graph. Not yet run on a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# (part, q [T, Hq, D], k_cache, v_cache, out [T, Hq, D]) -> lse [Hq, T] float32
Attend = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PagedStep:
    """A planned step as its attention calls see it.

    Attributes:
        levels: one part per level, for system attention; in `DevicePlan`'s terms, or whatever
            describes the same call to `Attend`.
        context: the part of context attention.
        index: int32 [levels (+ 1 with `dense`), T], places of the tokens in the order of each
            level, and of level 0 once more for those that are in the dense group; -1: none.
        dense: the part of a group of level 0 whose keys follow one another in memory.
    """

    levels: Sequence[Any]
    context: Any
    index: Tensor
    dense: Any | None = None


def paged_relay(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: PagedStep,
    attend: Attend,
    *,
    out: Tensor,
    side: "torch.cuda.Stream | None" = None,
) -> Tensor:
    """Attention of every row to its segments and its context.

    The context is attended for all rows in their own order, straight into ``out``; rows in no group
    are then done. Per level the queries of grouped rows are gathered, attend to their segments, and
    the fusion kernel merges what they saw into ``out``.

    Args:
        q: [T, Hq, D], tokens of padding included.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], as ``attend`` takes them.
        step: from `DevicePlan.update`.
        attend: a variable-length attention over the paged cache that writes its out and returns its
            LSE; for tokens of no sequence it need write neither. For ``step.dense`` it gets the
            caches as [num_blocks * block_size, Hkv, D].
        out: [T, Hq, D], bf16, fp16 or fp32; written in place.
        side: run system attention on this stream, beside context attention. It must be a stream
            that nothing else uses.

    Returns:
        out.
    """
    # Imported here: triton is absent or useless where there is no GPU.
    from vllm_relay.ops.fusion.triton import merge_into
    from vllm_relay.ops.step.gather import gather_rows

    def system() -> tuple[list[Tensor], list[Tensor]]:
        outs = [torch.empty_like(out) for _ in range(step.index.shape[0])]
        queries = gather_rows(q, step.index[: len(step.levels)])
        lses = [
            attend(part, queries[level], k_cache, v_cache, outs[level])
            for level, part in enumerate(step.levels)
        ]
        if step.dense is not None:
            # Views: a cache where blocks do not follow one another raises.
            k, v = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
            lses.append(attend(step.dense, queries[0], k, v, outs[-1]))
        return outs, lses

    if side is None:
        outs, lses = system()
        lse = attend(step.context, q, k_cache, v_cache, out)
    else:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            # What is allocated here comes back to this stream's pool, and the next to take it has
            # waited for the main stream, the last to read it.
            outs, lses = system()
        lse = attend(step.context, q, k_cache, v_cache, out)
        main.wait_stream(side)
    return merge_into(out, lse, outs, lses, step.index)
