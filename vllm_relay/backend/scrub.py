"""Scrub: relayed steps compared with the KV cache and with vLLM's own attention, for canaries."""

import random

import torch
from torch import Tensor

# Largest difference of a row from vLLM's: norm of the difference over that of vLLM's. Rounding
# makes less than 0.02 in bfloat16, KV of other tokens about 1.
LIMIT = 0.1


class ScrubError(RuntimeError):
    """A relayed step that is not what it must be; the message says where."""


def compare_block(
    packed: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor], at: int, block_id: int
) -> None:
    """Compare the block at index ``at`` of a packed segment with the KV cache's.

    Args:
        packed, fresh: keys and values, uint8 ``[Hkv, bytes]``, of the segment, and of this block
            packed anew.
    """
    for name, ours, cached in zip(("keys", "values"), packed, fresh, strict=True):
        size = cached.shape[1]
        if not torch.equal(ours[:, at * size : (at + 1) * size], cached):
            raise ScrubError(f"packed {name} of KV block {block_id} are not those of the KV cache")


def compare_row(output: Tensor, stock: Tensor) -> None:
    """Compare one random token of relay's output with vLLM's, both ``[T, Hq, D]``."""
    token = random.randrange(len(output))
    ours, theirs = output[token].float(), stock[token].float()
    error, norm = float((ours - theirs).norm()), float(theirs.norm())
    if not error <= LIMIT * norm:
        raise ScrubError(
            f"token {token} of {len(output)} is {error:.2g} from vLLM's, whose norm is {norm:.2g}"
        )
