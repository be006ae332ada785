"""Parts that FlashAttention 3 may divide the keys of segments into, for calls in CUDA graphs."""

import torch

# Rows of packed grouped queries in a tile on Hopper (flash-attention, hopper/tile_size.h).
TILE_ROWS = 128
# An H100's, where no GPU tells.
PROCESSORS = 132


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; `PROCESSORS` for another device."""
    if device.type != "cuda":
        return PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def system_splits(
    tokens: int, heads: int, kv_heads: int, processors: int = PROCESSORS, most: int = 32
) -> int:
    """The fewest parts with which one group of all queries has a tile for every processor.

    FlashAttention's scheduler takes fewer where the step has more tiles
    (``prepare_varlen_num_blocks``); the bound decides how much memory its partials take, float32
    [splits, heads, tokens, head size], and how many tiles there can be where queries are few.

    Args:
        tokens: query tokens of the call. heads, kv_heads: of one rank.
        most: what vLLM allows (``max_num_splits``); 0: FlashAttention chooses, and so does this.
    """
    tiles = kv_heads * -(-tokens * (heads // kv_heads) // TILE_ROWS)
    return min(most, max(1, -(-processors // max(1, tiles))))
