"""The Triton fusion kernel: its arithmetic under the interpreter, and that it compiles for CUDA.

Both run in processes of their own: the interpreter is chosen by an environment variable that must
not reach other tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

pytest.importorskip("triton", reason="needs triton")


def run(*command: str, **env: str) -> None:
    """In the root of the repository, which comes after what ``PYTHONPATH`` in ``env`` names."""
    given = env.pop("PYTHONPATH", None) or os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [given, str(ROOT)]))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_under_the_interpreter():
    cases = str(HERE / "interpreted_fusion.py")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", cases, TRITON_INTERPRET="1")


def test_compiles_for_cuda():
    run(str(HERE / "compiled_fusion.py"), TRITON_INTERPRET="0")
