"""The CPU kernels with AddressSanitizer and UBSan: `python -m tests.unit.ops.sanitized OUT.so`."""

import os
import platform
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Instruction sets that no wheel has, of the lowest ranks: they run if they are named.
TEST_SETS = Path(__file__).parent / "csrc/isa"
INCLUDES = [f"-I{folder}" for folder in (TEST_SETS, ROOT / "vllm_relay/ops/csrc/isa")]


def setup_file() -> dict[str, Any]:
    """Globals of `setup.py`."""
    with mock.patch("setuptools.setup"):
        return runpy.run_path(str(ROOT / "setup.py"))


def objects(
    path: Path,
    compiler: str,
    machine: str,
    flags: list[str],
    only: Collection[str] | None = None,
) -> list[str]:
    """Object files PATH.N.o of the library for the instruction sets of this kind of machine.

    They are compiled as `setup.py` does, with more flags. only: names of instruction sets, without
    the others; None: all of them, and `TEST_SETS`.
    """
    setup = setup_file()
    sets = [*setup["instruction_sets"](machine, TEST_SETS), *setup["instruction_sets"](machine)]
    sets = [isa for isa in sets if only is None or isa.name in only]
    listed = f"-DRELAY_ISAS={setup['table'](sets)}"
    parts = [(source, [listed]) for source in sorted((ROOT / setup["SOURCES"]).glob("*.cpp"))]
    parts += [(ROOT / setup["KERNELS"], [*isa.flags, f"-DRELAY_ISA={isa.name}"]) for isa in sets]
    found, commands = [], []
    for index, (source, own) in enumerate(parts):
        found.append(str(path.with_suffix(f".{index}.o")))
        options = [*setup["COMMON"], *flags, *own, *INCLUDES, "-fPIC"]
        commands.append([compiler, *options, "-c", str(source), "-o", found[-1]])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        if any(pool.map(subprocess.call, commands)):
            raise RuntimeError(f"the kernels do not compile with {' '.join(flags)}")
    return found


def build(path: Path, flags: list[str] = FLAGS, only: Collection[str] | None = None) -> None:
    """Compile the library with sanitizers, or other flags, for instruction sets as `objects`."""
    compiler = os.environ.get("CXX", "g++")
    linked = objects(path, compiler, platform.machine(), flags, only)
    subprocess.run([compiler, *flags, "-shared", "-o", str(path), *linked], check=True)


def environment() -> dict[str, str]:
    """Environment variables with which an ordinary Python loads the library."""
    compiler = os.environ.get("CXX", "g++")
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], text=True, capture_output=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    options = "detect_leaks=0:abort_on_error=0:detect_odr_violation=0"
    return {"LD_PRELOAD": ":".join(runtimes), "ASAN_OPTIONS": options}


if __name__ == "__main__":
    assert sysconfig.get_platform().startswith("linux")
    build(Path(sys.argv[1]))
    print(" ".join(f"{name}={value}" for name, value in environment().items()))
