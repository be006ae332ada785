"""The CPU kernels: a C++ library without PyTorch headers, loaded with ctypes; the rest is declared
in pyproject.toml.

The library is optional. Without a C++ compiler the installation works, and PyTorch's kernels are
used in its place. Kernels for instruction sets that the compiler does not know are left out.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("vllm_relay/ops/csrc")
COMMON = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-g0"]
COMMON += ["-Wno-maybe-uninitialized"]  # GCC 12 warns of its own intrinsics
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# Which of them a machine has is found out when the library is loaded.
INSTRUCTION_SETS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {
        "avx2": AVX2,
        "avx512": [*AVX512, "-mprefer-vector-width=512"],
        "avx512_bf16": [*AVX512, "-mavx512bf16", "-mprefer-vector-width=512"],
    }


class BuildKernels(build_ext):
    """Compiles the file of the kernels once per instruction set, each with flags of its own."""

    def build_extension(self, extension: Extension) -> None:
        for name, flags in INSTRUCTION_SETS.items():
            try:
                extension.extra_objects += self.compiler.compile(
                    [str(SOURCES / "kernels.cpp")],
                    output_dir=f"{self.build_temp}/{name}",
                    macros=[("RELAY_ISA", name)],
                    extra_postargs=[*COMMON, *flags],
                    depends=extension.depends,
                )
            except Exception:
                if name == "portable":
                    raise
                print(f"vllm-relay: this compiler cannot make the CPU kernels for {name}")
        super().build_extension(extension)


setup(
    ext_modules=[
        Extension(
            "vllm_relay.ops.native._kernels",
            [str(SOURCES / "relay.cpp")],
            depends=[str(path) for path in sorted(SOURCES.glob("*"))],
            extra_compile_args=COMMON,
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
