"""Triton's interpreter with the bfloat16 of the hardware."""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def hardware_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of values rather than of bits, and casts to the nearest rather than towards 0."""
    # Not before tests/triton/conftest.py has set TRITON_INTERPRET.
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def widened(handle: Any) -> Any:
        """The values of a handle; the interpreter keeps bfloat16 as the integers of its bits."""
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        product = np.matmul(widened(a), widened(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        nearest = torch.tensor(src.data).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(nearest.numpy().view(np.uint16), dst_type.scalar)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
