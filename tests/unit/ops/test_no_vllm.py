"""`ops` and `sharing` stay usable without vLLM, and load Triton only for a CUDA tensor."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("package", ["vllm_relay.ops", "vllm_relay.sharing"])
def test_imports_neither_vllm_nor_triton(package):
    code = f"import torch, sys; torch_only = set(sys.modules); import {package}; " + (
        "new = {name.split('.')[0] for name in set(sys.modules) - torch_only}; "
        "sys.exit(str(new & {'vllm', 'triton'}) if new & {'vllm', 'triton'} else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
