"""Random calls of the Arm kernels, emulated by qemu, against the float64 oracle.

    python -m tests.unit.ops.fuzz_arm --cases 10000 --isa neon [--seed 0] [--runner PATH]

The cases are those of `fuzz_native`, with the same seeds. Needs the compiler and the emulator in
`TOOLS`. A run that was ended goes on with `--seed` of the last line.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.unit.ops import fuzz_native, sanitized
from tests.unit.ops.emulated import EmulatedLibrary
from vllm_relay.ops.native import library as native

COMPILER, EMULATOR = TOOLS = "aarch64-linux-gnu-g++", "qemu-aarch64"
UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
CHUNK = 250


def missing() -> str | None:
    """The reason why the kernels cannot be emulated here, or None."""
    lacking = [name for name in TOOLS if shutil.which(name) is None]
    return f"this machine has no {' and no '.join(lacking)}" if lacking else None


def build(path: Path, flags: list[str]) -> None:
    """Compile `arm_runner` with the kernels that `setup.py` compiles on an Arm machine."""
    linked = sanitized.objects(path, COMPILER, "aarch64", flags)
    runner = Path(__file__).with_name("arm_runner.cpp")
    headers = f"-I{sanitized.ROOT / 'vllm_relay/ops/csrc'}"
    command = [COMPILER, "-std=c++17", "-O1", "-static", *flags, headers]
    subprocess.run([*command, str(runner), *linked, "-o", str(path)], check=True)


def emulated(runner: Path, cpu: str = "max") -> EmulatedLibrary:
    """The kernels on this CPU model of qemu."""
    return EmulatedLibrary([EMULATOR, "-cpu", cpu, str(runner)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isa", default="neon", help="neon, neon_bf16 or portable")
    parser.add_argument("--runner", type=Path, help="built there if missing; default: temporary")
    parser.add_argument("--undefined", action="store_true", help="build it with UBSan")
    args = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        runner = args.runner or Path(folder) / "runner"
        if not runner.exists():
            build(runner, UNDEFINED if args.undefined else [])
        library = emulated(runner)
        library.use_isa(args.isa)
        native.library = lambda: library
        started, failed, end = time.monotonic(), 0, args.seed + args.cases
        for seed in range(args.seed, end, CHUNK):
            failures = fuzz_native.run(min(CHUNK, end - seed), seed)
            failed += len(failures)
            print(*failures[:10], sep="\n", end="")
            done, seconds = min(seed + CHUNK, end), time.monotonic() - started
            print(f"{args.isa}: seeds {args.seed} to {done}, {failed} failures, {seconds:.0f} s")
            sys.stdout.flush()
        library.close()
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
