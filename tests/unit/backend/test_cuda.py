"""The CUDA backend on CPU tensors; in processes of their own, as Triton's interpreter needs.

Over the classes of the installed engine, and of the oldest and the newest CUDA release.
"""

import os

import pytest

from tests.unit.ops.test_fusion_triton import run
from tools.engine_sources import WHEELS, folder_of

pytest.importorskip("triton", reason="needs triton")
CASES = (
    *("-p", "tests.unit.backend.cuda_cases"),
    "tests/unit/backend/interpreted_cuda.py",
    "tests/unit/backend/interpreted_graphs.py",
)


def test_on_cpu_tensors():
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES, TRITON_INTERPRET="1")


@pytest.mark.parametrize("version", WHEELS)
def test_with_the_classes_of_a_cuda_release(version):
    folder = folder_of(version)
    if not folder.is_dir():
        pytest.skip(f"vLLM {version} is not in {folder.parent.name}: make sources")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    code = f"import vllm.version; assert vllm.version.__version__ == {version!r}"
    run("-c", code, PYTHONPATH=path)
    run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *CASES,
        TRITON_INTERPRET="1",
        PYTHONPATH=path,
    )
