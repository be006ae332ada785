"""Build llama.cpp's server for this machine, and write the demo model as it reads it.

The sources are those in the PyPI package ``llama-cpp-python``. They are downloaded with the pip of
the running environment and built with CMake and the machine's C++ compiler: minutes on two cores.
``.llama.cpp`` then holds ``llama-server`` and the weights of ``.models`` in bf16.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

PACKAGE, RELEASE = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
OPTIONS = {
    **dict.fromkeys(("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_OPENSSL"), "OFF"),
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_NATIVE": "ON",
    "CMAKE_BUILD_TYPE": "Release",
}
ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
TARGET = ROOT / ".llama.cpp"
SERVER, WEIGHTS = "llama-server", f"{MODEL.name}-bf16.gguf"


def call(*command: str | Path, env: Mapping[str, str] | None = None) -> None:
    """Run it, its output in ours; end with its name where it fails."""
    try:
        status = subprocess.run(command, env={**os.environ, **(env or {})}).returncode
    except FileNotFoundError:
        sys.exit(f"make_llama_cpp: {command[0]} is not installed")
    if status:
        sys.exit(f"make_llama_cpp: {Path(command[0]).name} ended with status {status}")


def sources(folder: Path) -> Path:
    """Download the package into `folder` and unpack llama.cpp there."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q")
    call(*pip, "--no-deps", "--no-binary", PACKAGE, "--dest", folder, f"{PACKAGE}=={RELEASE}")
    (archive,) = folder.glob("*.tar.gz")
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        sys.exit(f"make_llama_cpp: sha256 of {archive.name} is {digest}, not {SHA256}")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (found,) = folder.glob("*/vendor/llama.cpp")
    return found


def build(source: Path, target: Path) -> None:
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    call("cmake", "-S", source, "-B", source / "build", *options)
    jobs = ("--parallel", str(os.cpu_count()))
    call("cmake", "--build", source / "build", "--target", SERVER, *jobs)
    os.replace(source / "build" / "bin" / SERVER, target / SERVER)


def convert(source: Path, target: Path) -> None:
    """Write `MODEL` as a GGUF file, with llama.cpp's own script."""
    script, made = source / "convert_hf_to_gguf.py", source / WEIGHTS
    options = ("--outtype", "bf16", "--outfile", made)
    call(sys.executable, script, MODEL, *options, env={"PYTHONPATH": str(source / "gguf-py")})
    os.replace(made, target / WEIGHTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, default=TARGET)
    target = parser.parse_args().target
    if not all((target / name).is_file() for name in (SERVER, WEIGHTS)):
        target.mkdir(parents=True, exist_ok=True)
        # Beside what is kept, so that a rename moves it there whole.
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            source = sources(Path(scratch))
            convert(source, target)
            build(source, target)
    print(f"llama.cpp: {target}")


if __name__ == "__main__":
    main()
