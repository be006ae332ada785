"""Row-major copies of the CPU engine's KV blocks, for comparisons."""

import torch

from vllm_relay.backend.kv_layout import BlockLayout


def copy_rows(
    layout: BlockLayout,
    kv_cache: torch.Tensor,
    block_ids: list[int],
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Copy blocks into row-major keys and values.

    Args:
        kv_cache: ``[num_blocks, H, block_size, 2 * D]``, the engine's view.
        block_ids: blocks to copy, in order.
        keys, values: ``[H, len(block_ids) * block_size, D]``, written.
    """
    for operand, rows in ((layout.key, keys), (layout.value, values)):
        t, d = operand.token, operand.channel
        # [num_blocks, H, T1, T0, D1, D0]: token t is [t // |T0|, t % |T0|]
        source = kv_cache.as_strided(
            (*kv_cache.shape[:2], t.size // t.inner, t.inner, d.size // d.inner, d.inner),
            (
                *kv_cache.stride()[:2],
                *(t.outer_stride, t.inner_stride),
                *(d.outer_stride, d.inner_stride),
            ),
            kv_cache.storage_offset() + operand.offset,
        )
        # [H, T, D] -> [H, blocks, T1, T0, D1, D0], as the source is per block
        target = rows.unflatten(1, (len(block_ids), -1, t.inner)).unflatten(4, (-1, d.inner))
        for i, block_id in enumerate(block_ids):
            target[:, i].copy_(source[block_id])
