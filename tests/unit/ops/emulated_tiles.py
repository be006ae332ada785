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
SOURCES = Path(__file__).parent / "csrc"


def missing() -> str | None:
    """The reason why the kernels cannot run here, or None."""
    flags = Path("/proc/cpuinfo")
    has = flags.exists() and "avx512_bf16" in flags.read_text()
    return None if has else "this machine has no AVX-512 with BF16"


def build(path: Path) -> None:
    """Compile the library for the emulated tile unit alone, optimised."""
    sanitized.build(path, FLAGS, only=[ISA])


def build_program(path: Path, isa: str, flags: list[str]) -> None:
    """Compile ``csrc/NAME.cpp``, the name being the path's, for an instruction set."""
    setup = sanitized.setup_file()
    sets = setup["instruction_sets"]("x86_64")
    sets += setup["instruction_sets"]("x86_64", sanitized.TEST_SETS)
    (own,) = (x.flags for x in sets if x.name == isa)
    options = [*setup["COMMON"], *flags, *own, *sanitized.INCLUDES]
    source = SOURCES / f"{path.name}.cpp"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *options, str(source), "-o", str(path)], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
