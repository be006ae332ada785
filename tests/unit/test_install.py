"""Installation from a wheel and from a source distribution, with a compiler and without."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A call that the CPU kernels take; prints whether they do, and which kernels are loaded.
USE = """
import torch
from vllm_relay.ops import providers, system_attention
from vllm_relay.ops.native import library as native
q = torch.randn(3, 2, 32)
out, lse = system_attention(q, q, q)
assert out.isfinite().all()
native_chosen = providers.choose("system", q, q, q).name == "native"
print("kernels" if native_chosen else "no kernels:", native.library())
"""
NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy") / "source"
    left_out = shutil.ignore_patterns(".*", "build", "*.so", "__pycache__", "*.egg-info", "results")
    shutil.copytree(ROOT, copy, ignore=left_out)
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    make = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", make], cwd=source, check=True, capture_output=True)
    (made,) = folder.glob("*.tar.gz")
    return made


def pip(*arguments: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def build_wheel(project: Path, folder: Path, **environment: str) -> Path:
    """`pip wheel` of a source tree or distribution."""
    options = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(folder))
    pip("wheel", *options, str(project), **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(package: Path, target: Path, **environment: str) -> None:
    """Install a source distribution or wheel into a folder of its own."""
    options = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--target", str(target))
    pip("install", *options, str(package), **environment)


def use(target: Path, **environment: str) -> str:
    """Output of `USE` with the package in this folder."""
    script = f"import sys; sys.path.insert(0, {str(target)!r})\n{USE}"
    # not from the repository, where the package lies, too
    used = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=target,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
        capture_output=True,
        text=True,
    )
    assert used.returncode == 0, used.stderr
    return used.stdout.strip()


@pytest.mark.slow
def test_an_sdist_installs_without_a_compiler_and_says_what_is_missing(
    sdist: Path, tmp_path: Path
) -> None:
    install(sdist, tmp_path, **NO_COMPILER)
    said = use(tmp_path)
    assert said == "no kernels: vllm-relay was installed without them (no C++ compiler)"


@pytest.mark.slow
def test_a_wheel_built_without_a_compiler_installs(source: Path, tmp_path: Path) -> None:
    wheel = build_wheel(source, tmp_path, **NO_COMPILER)
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
    install(wheel, tmp_path / "target", **NO_COMPILER)
    assert use(tmp_path / "target").startswith("no kernels")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_a_wheel_carries_the_kernels_to_where_no_compiler_is(
    compiler: str, sdist: Path, tmp_path: Path
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"this machine has no {compiler}")
    # Optimised, it takes minutes: `make env` does.
    quick = tmp_path / compiler
    quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    quick.chmod(0o755)
    built = {"CXX": str(quick), "CC": {"g++": "gcc", "clang++": "clang"}[compiler]}
    wheel = build_wheel(sdist, tmp_path, **built)
    assert "-py3-none-linux_" in wheel.name
    # A fresh environment with nothing in its PATH but itself; torch comes from this one.
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    nowhere = {"PATH": str(venv / "bin")} | NO_COMPILER
    install(wheel, packages, **nowhere)
    import torch

    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    used = subprocess.run(
        [str(venv / "bin" / "python"), "-I", "-c", USE], env=nowhere, capture_output=True, text=True
    )
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith("kernels <vllm_relay.ops.native.library.Library")
