"""The CPU kernels, a C++ library without Python or PyTorch headers; pyproject.toml has the rest.

The library is optional: without a C++17 compiler the package installs without it. An instruction
set whose flags the compiler does not know is left out. Adding one takes a file in
``vllm_relay/ops/csrc/isa``: its first comment names the machines, flags, condition and rank.
"""

import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("vllm_relay/ops/csrc")
KERNELS = SOURCES / "generic/kernels.cpp"  # compiled once per instruction set
COMMON = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-g0"]
COMMON += ["-Wno-maybe-uninitialized"]  # GCC 12 warns of its own intrinsics


class InstructionSet(NamedTuple):
    """One ``isa/NAME.h``."""

    rank: int  # of those that a machine has, the highest is used
    name: str
    flags: list[str]
    needs: str  # C++ condition, see csrc/dispatch.cpp


def instruction_sets(machine: str, folder: Path = SOURCES / "isa") -> list[InstructionSet]:
    """Instruction sets of this kind of machine (`platform.machine()`), the least first."""
    found = []
    for path in (Path(__file__).parent / folder).glob("*.h"):
        keys = r"^// (machines|flags|needs|rank):[ ]*(.*)$"
        line = dict(re.findall(keys, path.read_text(), re.M))
        if machine in line["machines"].split() or line["machines"] == "any":
            flags = line["flags"].split()
            found.append(InstructionSet(int(line["rank"]), path.stem, flags, line["needs"]))
    return sorted(found)


def table(compiled: list[InstructionSet]) -> str:
    """Value of the macro RELAY_ISAS: these instruction sets, the best first."""
    return " ".join(f"ISA({isa.name}, {isa.needs})" for isa in reversed(compiled))


class BuildKernels(build_ext):
    """Compiles the kernels once per instruction set, each with its own flags, side by side."""

    def build_extension(self, extension: Extension) -> None:
        def compile_for(isa: InstructionSet) -> list[str]:
            return self.compiler.compile(
                [str(KERNELS)],
                output_dir=f"{self.build_temp}/{isa.name}",
                macros=[("RELAY_ISA", isa.name)],
                extra_postargs=[*COMMON, *isa.flags],
                depends=extension.depends,
            )

        sets = instruction_sets(platform.machine())
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            done = [pool.submit(compile_for, isa) for isa in sets]
        compiled = []
        for isa, objects in zip(sets, done, strict=True):
            try:
                extension.extra_objects += objects.result()
                compiled.append(isa)
            except Exception:
                if not compiled:
                    raise
                print(f"vllm-relay: this compiler cannot build the CPU kernels for {isa.name}")
        extension.define_macros.append(("RELAY_ISAS", table(compiled)))
        super().build_extension(extension)

    def get_ext_filename(self, name: str) -> str:
        """Path of the library, the same for every Python version."""
        return f"{name.replace('.', '/')}.so"


class Wheel(bdist_wheel):
    """A wheel for every Python 3 on this platform: the library has no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "vllm_relay.ops.native._kernels",
            [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(path) for path in sorted(SOURCES.rglob("*.[ch]*"))],
            extra_compile_args=COMMON,
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
