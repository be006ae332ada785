"""Argument checks shared by the ops: one ValueError that names the argument, before any kernel.

All but `lengths` compare shapes, dtypes and devices only: they cost nanoseconds to a few
microseconds and never read a tensor's data (which would be a device sync on CUDA).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def rank(name: str, x: Tensor, dims: int, layout: str) -> None:
    """`x` is a tensor with `dims` dimensions; `layout` says which, for the message."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor {layout}, got {type(x).__name__}")
    if x.dim() != dims:
        raise ValueError(f"{name}: expected {layout}, got shape {tuple(x.shape)}")


def shape(name: str, x: Tensor, want: tuple[int, ...], layout: str) -> None:
    """`x` is a tensor of exactly the shape `want`."""
    rank(name, x, len(want), layout)
    if x.shape != want:
        raise ValueError(f"{name}: expected {layout} = {want}, got shape {tuple(x.shape)}")


def like(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """`x` has the dtype and the device of `other`."""
    if x.dtype != other.dtype:
        raise ValueError(f"{name}: dtype {x.dtype} differs from {other_name}'s {other.dtype}")
    if x.device != other.device:
        raise ValueError(f"{name}: device {x.device} differs from {other_name}'s {other.device}")


def query(q: Tensor, dims: int, layout: str) -> None:
    """`q` is a bf16, fp16 or fp32 tensor with at least one head and one channel."""
    rank("q", q, dims, layout)
    if q.dtype not in FLOATS:
        raise ValueError(f"q: expected bfloat16, float16 or float32, got {q.dtype}")
    if q.shape[-2] == 0 or q.shape[-1] == 0:
        raise ValueError(f"q: no heads or no channels in shape {tuple(q.shape)}")


def key_value(
    q: Tensor, k: Tensor, v: Tensor, dims: int, layout: str, names: tuple[str, str] = ("k", "v")
) -> None:
    """`k` and `v` are alike, share q's dtype, device and head size, and divide its heads."""
    k_name, v_name = names
    rank(k_name, k, dims, layout)
    like(k_name, k, "q", q)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{k_name}: head size {k.shape[-1]} differs from q's {q.shape[-1]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{k_name}: {k.shape[-2]} heads do not divide the {q.shape[-2]} query heads"
        )
    rank(v_name, v, dims, layout)
    like(v_name, v, "q", q)
    if v.shape != k.shape:
        raise ValueError(
            f"{v_name}: shape {tuple(v.shape)} differs from {k_name}'s {tuple(k.shape)}"
        )


def scale_or_default(scale: float | None, head_size: int) -> float:
    """The softmax scale: `head_size ** -0.5` where none is given."""
    if scale is None:
        return float(head_size**-0.5)
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number or None, got {scale!r}")
    return float(scale)


def integers(
    name: str, x: Tensor, want: tuple[int, ...], layout: str, device: torch.device
) -> None:
    """`x` is an int32 or int64 tensor of the shape `want` on `device`."""
    shape(name, x, want, layout)
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected int32 (or int64), got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name}: device {x.device} differs from q's {device}")


def lengths(name: str, x: Tensor, most: int) -> list[int]:
    """The values of `x`, all within 0..most. Reads the data: a sync on CUDA."""
    values: list[int] = x.tolist()
    for row, value in enumerate(values):
        if not 0 <= value <= most:
            raise ValueError(f"{name}: {value} in row {row} is outside 0..{most}")
    return values


def partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """`outs` are n >= 1 alike [T, H, D] tensors, `lses` as many float32 [H, T]."""
    if len(outs) == 0:
        raise ValueError("outs: expected at least one partial, got none")
    if len(lses) != len(outs):
        raise ValueError(f"lses: expected one per partial ({len(outs)}), got {len(lses)}")
    first = outs[0]
    rank("outs[0]", first, 3, "[T, H, D]")
    if first.dtype not in FLOATS:
        raise ValueError(f"outs[0]: expected bfloat16, float16 or float32, got {first.dtype}")
    tokens, heads, _ = first.shape
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if i:
            shape(f"outs[{i}]", out, tuple(first.shape), "[T, H, D]")
            like(f"outs[{i}]", out, "outs[0]", first)
        shape(f"lses[{i}]", lse, (heads, tokens), "[H, T]")
        if lse.dtype != torch.float32:
            raise ValueError(f"lses[{i}]: expected float32, got {lse.dtype}")
        if lse.device != first.device:
            raise ValueError(
                f"lses[{i}]: device {lse.device} differs from outs[0]'s {first.device}"
            )
