"""Build llama.cpp's server for this machine, and write the demo model as it reads it.

The sources are those in the PyPI package ``llama-cpp-python``. They are downloaded with the pip of
the running environment and built with CMake and the machine's C++ compiler: minutes on two cores.
A folder of ``.llama.cpp``, named by the release, then holds ``llama-server`` and the weights of
``.models`` in bf16.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

OPTIONS = {
    **dict.fromkeys(("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_OPENSSL"), "OFF"),
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_NATIVE": "ON",
    "CMAKE_BUILD_TYPE": "Release",
}
ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
PINNED = ROOT / "requirements" / "llama-cpp.txt"
SERVER, WEIGHTS = "llama-server", f"{MODEL.name}-bf16.gguf"


def target_folder() -> Path:
    """Where the pinned release lies once it is built; its name is the release."""
    (release,) = re.findall(r"==(\S+)", PINNED.read_text())
    return ROOT / ".llama.cpp" / release


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
    call(*pip, "--no-deps", "--no-binary", ":all:", "--dest", folder, "-r", PINNED)
    (archive,) = folder.glob("*.tar.gz")
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
    parser.parse_args()
    target = target_folder()
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
