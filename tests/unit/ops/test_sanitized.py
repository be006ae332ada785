"""The CPU kernels under AddressSanitizer and UBSan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.ops import emulated_tiles, sanitized
from tests.unit.ops.test_native import ALL
from vllm_relay.ops.native import library as native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        isinstance(native.library(), str), reason=f"no CPU kernels: {native.library()}"
    ),
]


def can_run() -> list[str]:
    """Instruction sets that this machine has, and the emulated one."""
    return native.loaded().isas + ([] if emulated_tiles.missing() else [emulated_tiles.ISA])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sanitized") / "kernels.so"
    sanitized.build(path, only=can_run())
    return path


def run(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python that can load the library; its last argument is the library's path."""
    return subprocess.run(
        [sys.executable, *arguments, str(library)],
        cwd=sanitized.ROOT,
        env=os.environ | sanitized.environment(),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("isa", [*ALL, emulated_tiles.ISA])
def test_random_calls_touch_no_memory_but_their_own(isa: str, library: Path) -> None:
    if isa not in can_run():
        pytest.skip(f"this machine has no {isa}")
    cases = ("--cases", "150", "--isa", isa, "--library")
    done = run(library, "-m", "tests.unit.ops.fuzz_native", *cases)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_sanitizers_catch_a_read_beyond_a_tensor(library: Path) -> None:
    script = (
        "import sys, numpy as np, torch\n"
        "from vllm_relay.ops.attention import native as attention\n"
        "from vllm_relay.ops.native import library as native\n"
        "lib = native.Library(sys.argv[1]); native.library = lambda: lib\n"
        "q, k = torch.ones(1, 1, 32), torch.ones(64, 1, 32)\n"
        "layout = native.layout_of(k, k, False)\n"
        "attention.attend_once(q, 1, 1.0, layout, np.array([[0, 1, 65, 0, 0, 0, 0, 0]]))\n"
    )
    done = run(library, "-c", script)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
