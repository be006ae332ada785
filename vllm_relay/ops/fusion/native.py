"""Relay fusion on the C++ CPU kernels."""

import ctypes
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
    count = len(outs)
    call = native.FuseCall(
        dtype=native.DTYPES[outs[0].dtype],
        fused_dtype=native.DTYPES[out.dtype],
        tokens=tokens,
        heads=heads,
        head_size=head_size,
        partials=count,
        threads=torch.get_num_threads(),
        outs=(ctypes.c_void_p * count)(*(x.data_ptr() for x in outs)),
        lses=(ctypes.c_void_p * count)(*(x.data_ptr() for x in lses)),
        out_token=(ctypes.c_int64 * count)(*(x.stride(0) for x in outs)),
        out_head=(ctypes.c_int64 * count)(*(x.stride(1) for x in outs)),
        lse_token=(ctypes.c_int64 * count)(*(x.stride(1) for x in lses)),
        lse_head=(ctypes.c_int64 * count)(*(x.stride(0) for x in lses)),
        places=None if places is None else places.data_ptr(),
        fused=out.data_ptr(),
        fused_token=out.stride(0),
        fused_head=out.stride(1),
        parallel=library.parallel,
    )
    library.fuse(call)
