"""Installing from a source distribution, with a compiler and without."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A call that our kernels take, and who computes it.
USE = """
import torch
from vllm_relay.ops import providers, system_attention
from vllm_relay.ops.native import library as native
q = torch.randn(3, 2, 32)
out, lse = system_attention(q, q, q)
assert out.isfinite().all()
print(providers.choose("system", q, q, q).name, native.library())
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    left_out = shutil.ignore_patterns(".*", "build", "*.so", "__pycache__", "*.egg-info", "results")
    shutil.copytree(ROOT, source, ignore=left_out)
    make = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", make], cwd=source, check=True, capture_output=True)
    (made,) = folder.glob("*.tar.gz")
    return made


def install(sdist: Path, target: Path, **environment: str) -> str:
    """Install into a folder of its own; returns what `USE` prints there."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    pip += ["--no-cache-dir", "--target", str(target), str(sdist)]
    done = subprocess.run(pip, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    script = f"import sys; sys.path.insert(0, {str(target)!r})\n{USE}"
    # not from here, where the package lies, too
    used = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=target, capture_output=True, text=True
    )
    assert used.returncode == 0, used.stderr
    return used.stdout.strip()


def test_without_a_compiler_pytorch_computes(sdist: Path, tmp_path: Path) -> None:
    said = install(sdist, tmp_path, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert said == "torch vllm-relay was installed without them: no C++ compiler"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_with_a_compiler_our_kernels_compute(compiler: str, sdist: Path, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"this machine has no {compiler}")
    said = install(sdist, tmp_path, CXX=compiler, CC={"g++": "gcc", "clang++": "clang"}[compiler])
    assert said.startswith("native <vllm_relay.ops.native.library.Library")
