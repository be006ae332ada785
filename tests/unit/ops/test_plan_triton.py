"""The kernels that plan on the device, under the interpreter, and that they compile for CUDA.

In processes of their own, as test_fusion_triton.py tells.
"""

import pytest

from tests.unit.ops.test_fusion_triton import HERE, run

pytest.importorskip("triton", reason="needs triton")


def test_under_the_interpreter():
    cases = str(HERE / "interpreted_plan.py")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", cases, TRITON_INTERPRET="1")


def test_compiles_for_cuda():
    run(str(HERE / "compiled_plan.py"), TRITON_INTERPRET="0")
