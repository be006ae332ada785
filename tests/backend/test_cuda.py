"""The CUDA backend on CPU tensors; in a process of its own, as Triton's interpreter needs."""

import pytest

from tests.ops.test_fusion_triton import run

pytest.importorskip("triton", reason="needs triton")


def test_on_cpu_tensors():
    cases = "tests/backend/interpreted_cuda.py"
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", cases, TRITON_INTERPRET="1")
