"""Triton's interpreter with the bfloat16 of the hardware; used by the interpreted_*.py cases."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def widened(handle):
    """The values of a handle; the interpreter keeps bfloat16 as the integers of its bits."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(autouse=True)
def hardware_bfloat16(monkeypatch):
    """Products of values rather than of bits, and casts to the nearest rather than towards 0."""
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(widened(a), widened(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        nearest = torch.tensor(src.data).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(nearest.numpy().view(np.uint16), dst_type.scalar)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
