"""Argument checks shared by the ops: one ValueError that names the argument, before any kernel.

All but `lengths` compare shapes, dtypes and devices only: they cost nanoseconds to a few
microseconds and never read a tensor's data (which would be a device sync on CUDA).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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


def floats(name: str, dtype: torch.dtype) -> None:
    """`dtype` is one that the ops compute with."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name}: expected bfloat16, float16 or float32, got {dtype}")


def like(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """`x` has the dtype and the device of `other`."""
    if x.dtype != other.dtype:
        raise ValueError(f"{name}: dtype {x.dtype} differs from {other_name}'s {other.dtype}")
    if x.device != other.device:
        raise ValueError(f"{name}: device {x.device} differs from {other_name}'s {other.device}")


def query(q: Tensor, dims: int, layout: str) -> None:
    """`q` is a bf16, fp16 or fp32 tensor with at least one head and one channel."""
    rank("q", q, dims, layout)
    floats("q", q.dtype)
    if q.shape[-2] == 0 or q.shape[-1] == 0:
        raise ValueError(f"q: no heads or no channels in shape {tuple(q.shape)}")


def key_value(
    q: Tensor, k: Tensor, v: Tensor, dims: int, layout: str, names: tuple[str, str] = ("k", "v")
) -> None:
    """`k` and `v` are alike, share q's dtype, device and head size, and divide its heads."""
    for name, x in zip(names, (k, v), strict=True):
        rank(name, x, dims, layout)
        like(name, x, "q", q)
    name = names[0]
    heads, head_size = k.shape[-2:]
    if head_size != q.shape[-1]:
        raise ValueError(f"{name}: head size {head_size} differs from q's {q.shape[-1]}")
    if heads == 0 or q.shape[-2] % heads:
        raise ValueError(f"{name}: {heads} heads do not divide the {q.shape[-2]} query heads")
    if v.shape != k.shape:
        raise ValueError(
            f"{names[1]}: shape {tuple(v.shape)} differs from {name}'s {tuple(k.shape)}"
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


def lengths(
    name: str, x: Tensor, rows: int, layout: str, device: torch.device, most: int
) -> list[int]:
    """The values of `x`, `rows` integers within 0..most. Reads the data: a sync on CUDA."""
    integers(name, x, (rows,), layout, device)
    values: list[int] = x.tolist()
    for row, value in enumerate(values):
        if not 0 <= value <= most:
            raise ValueError(f"{name}: {value} in row {row} is outside 0..{most}")
    return values


def level_rows(name: str, rows: int, batch: int, coarser: int) -> None:
    """A level of `rows` pieces fits between the batch and a level of `coarser` pieces."""
    if rows < 1 or batch % rows or rows % coarser:
        raise ValueError(
            f"{name}: {rows} rows must divide the batch of {batch} and be a multiple of the "
            f"coarser level's {coarser}"
        )


def partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """`outs` are n >= 1 alike [T, H, D] tensors, `lses` as many float32 [H, T]."""
    if len(outs) == 0:
        raise ValueError("outs: expected at least one partial, got none")
    if len(lses) != len(outs):
        raise ValueError(f"lses: expected one per partial ({len(outs)}), got {len(lses)}")
    first = outs[0]
    rank("outs[0]", first, 3, "[T, H, D]")
    floats("outs[0]", first.dtype)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        shape(f"outs[{i}]", out, tuple(first.shape), "[T, H, D]")
        like(f"outs[{i}]", out, "outs[0]", first)
        shape(f"lses[{i}]", lse, (first.shape[1], first.shape[0]), "[H, T]")
        if lse.dtype != torch.float32:
            raise ValueError(f"lses[{i}]: expected float32, got {lse.dtype}")
        if lse.device != first.device:
            raise ValueError(
                f"lses[{i}]: device {lse.device} differs from outs[0]'s {first.device}"
            )


def places(index: Tensor, n: int, x: Tensor) -> None:
    """`index` is int32 [n, T] with a dense last dim, beside x [T, H, D]. Values are not read."""
    shape("index", index, (n, x.shape[0]), "[n, T]")
    if index.dtype != torch.int32 or index.device != x.device or index.stride(-1) != 1:
        raise ValueError(f"index: expected int32 on {x.device} with a dense last dim")
