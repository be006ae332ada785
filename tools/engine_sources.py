"""Fetch the Python files of vLLM's CUDA releases and an older Triton, to test without a GPU.

The wheels of the oldest and the newest supported release are downloaded with the pip of the
running environment and their ``vllm/**/*.py`` unpacked into ``.engines/vllm-VERSION``. With that
folder first on PYTHONPATH, ``import vllm`` finds this release instead of the installed CPU engine;
it has no compiled kernels. Triton is installed whole into ``.engines/triton-VERSION``.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = {
    "0.26.0": "adb1e4c9b46d0dfdb094121ae5aad670a42412dd813ed4e5db069ed6a15006de",
    "0.33.0": "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
}
# The ABI of the wheels, not that of this machine.
TAGS = ["--python-version", "3.12", "--platform", "manylinux_2_28_x86_64"]
# Of the oldest release's PyTorch; the environment has the newest.
TRITON = "3.6.0"
ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TARGET = ROOT / ".engines"


def folder_of(version: str, target: Path = DEFAULT_TARGET) -> Path:
    """Where the files of this release lie once fetched."""
    return target / f"vllm-{version}"


def pip(*args: str) -> None:
    """Run the environment's pip; end with its message where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args, "-q", "--no-deps"]
    done = subprocess.run([*command, "--only-binary=:all:"], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stderr}engine_sources: pip {args[0]} failed: {args[-1]}")


def fetch(version: str, target: Path) -> None:
    """Download, compare the checksum, unpack; the folder appears whole or not at all."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        pip("download", *TAGS, "--dest", scratch, f"vllm=={version}")
        (wheel,) = Path(scratch).glob("*.whl")
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != WHEELS[version]:
            sys.exit(f"engine_sources: sha256 of {wheel.name} is {digest}, not {WHEELS[version]}")
        with zipfile.ZipFile(wheel) as archive:
            python = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
            archive.extractall(Path(scratch) / "files", python)
        folder = folder_of(version, target)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(Path(scratch) / "files", folder)


def fetch_triton(target: Path) -> Path:
    """Install it; the folder appears whole or not at all."""
    folder = target / f"triton-{TRITON}"
    if not folder.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            pip("install", "--target", f"{scratch}/files", f"triton=={TRITON}")
            os.rename(f"{scratch}/files", folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=list(WHEELS), help="default: all known")
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET)
    args = parser.parse_args()
    for version in args.versions:
        if version not in WHEELS:
            parser.error(f"unknown version {version}; known: {', '.join(WHEELS)}")
        folder = folder_of(version, args.target)
        if not (folder / "vllm" / "__init__.py").is_file():
            fetch(version, args.target)
        print(f"engine sources: {folder}")
    print(f"engine sources: {fetch_triton(args.target)}")


if __name__ == "__main__":
    main()
