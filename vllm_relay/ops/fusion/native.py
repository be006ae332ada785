"""Relay fusion on the C++ CPU kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_relay.ops.native import library as native


def usable(outs: Sequence[Tensor], out: Tensor) -> bool:
    """True if the kernels can merge these partials."""
    return (
        out.device.type == "cpu"
        and native.unusable(out.dtype, out.shape[-1]) is None
        and all(x.stride(-1) == 1 for x in (*outs, out))
    )


def fuse(
    outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, places: Tensor | None = None
) -> None:
    """Relay fusion of N tokens, each written to its place in out.

    Args:
        outs: ``[N, H, D]``, of out's dtype or all float32; channels adjacent, as in out.
        lses: ``[H, N]`` float32.
        out: ``[T, H, D]``; other places are left alone.
        places: int64 ``[N]``; the first N where None.
    """
    library = native.loaded()
    tokens, heads, head_size = outs[0].shape
    call = native.Call(
        dtype=native.DTYPES[out.dtype],
        partial_dtype=native.DTYPES[outs[0].dtype],
        heads=heads,
        head_size=head_size,
        tokens=tokens,
        threads=torch.get_num_threads(),
        fused=native.Rows.of(out),
        places=None if places is None else places.data_ptr(),
        partials=native.Partial.array(outs, lses),
        num_partials=len(outs),
        parallel=library.parallel,
    )
    library.fuse(call)
