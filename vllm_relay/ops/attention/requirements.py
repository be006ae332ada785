"""Requirements of providers on machine and tensors; each check returns the reason it fails."""

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def module(name: str) -> Any:
    """The module, or a text that says why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        # A package built for another torch fails in many ways.
        return f"{name} cannot be imported: {error}"


def missing(name: str) -> str | None:
    """None if the module can be imported, which this does; else why not."""
    found = module(name)
    return found if isinstance(found, str) else None


def old_device(q: Tensor) -> str | None:
    """None from compute capability 8.0 on; else the reason."""
    if _capability(q.device.index) < (8, 0):
        return "needs compute capability 8.0 or more"
    return None


def not_flash(q: Tensor, k: Tensor, v: Tensor, block_multiple: int = 1) -> str | None:
    """Why FlashAttention cannot take these tensors (FlashAttention 2, csrc/flash_api.cpp).

    Args:
        block_multiple: tokens that a KV block, if k is paged (4-d), is a multiple of.
    """
    if not q.is_cuda:
        return "needs CUDA tensors"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, not {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"needs a head size that is a multiple of 8 up to 256, not {q.shape[-1]}"
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return "needs q, k and v whose channels are adjacent in memory"
    if k.dim() == 4 and k.shape[1] % block_multiple:
        return f"needs KV blocks of a multiple of {block_multiple} tokens, not {k.shape[1]}"
    return old_device(q)


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
