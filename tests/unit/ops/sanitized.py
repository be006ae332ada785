"""The CPU kernels with AddressSanitizer and UBSan: `python -m tests.unit.ops.sanitized OUT.so`."""

import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def build(path: Path) -> None:
    """Compile the library for all instruction sets, as `setup.py` does but with sanitizers."""
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(ROOT / "setup.py"))
    compiler = os.environ.get("CXX", "g++")
    common = [flag for flag in setup["COMMON"] if flag not in ("-O3", "-g0")]
    sets = setup["instruction_sets"]()
    listed = f"-DRELAY_ISAS={setup['table'](sets)}"
    parts = [(source, [listed]) for source in sorted((ROOT / setup["SOURCES"]).glob("*.cpp"))]
    parts += [(ROOT / setup["KERNELS"], [*isa.flags, f"-DRELAY_ISA={isa.name}"]) for isa in sets]
    objects, running = [], []
    for index, (source, flags) in enumerate(parts):
        objects.append(str(path.with_suffix(f".{index}.o")))
        command = [compiler, *common, *FLAGS, *flags, "-fPIC", "-c", str(source), "-o", objects[-1]]
        running.append(subprocess.Popen(command))
    if [process for process in running if process.wait()]:
        raise RuntimeError("the kernels do not compile with sanitizers")
    subprocess.run([compiler, *FLAGS, "-shared", "-o", str(path), *objects], check=True)


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
