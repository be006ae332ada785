"""The CPU kernels for AMX on an emulated tile unit, in plain C++ (`csrc/isa/amx_emulated.h`).

    python -m tests.unit.ops.emulated_tiles OUT.so
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.ops import sanitized

ISA = "amx_emulated"
FLAGS = ["-O2"]
PROGRAM = Path(__file__).parent / "csrc/tile_unit_test.cpp"


def missing() -> str | None:
    """The reason why the kernels cannot run here, or None."""
    flags = Path("/proc/cpuinfo")
    has = flags.exists() and "avx512_bf16" in flags.read_text()
    return None if has else "this machine has no AVX-512 with BF16"


def build(path: Path) -> None:
    """Compile the library for the emulated tile unit alone, optimised."""
    sanitized.build(path, FLAGS, tests_only=True)


def build_program(path: Path) -> None:
    """Compile the tests of the tile unit and of products on it, with sanitizers."""
    setup = sanitized.setup_file()
    (isa,) = setup["instruction_sets"]("x86_64", sanitized.TEST_SETS)
    options = [*setup["COMMON"], *sanitized.FLAGS, *isa.flags, *sanitized.INCLUDES]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *options, str(PROGRAM), "-o", str(path)], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
