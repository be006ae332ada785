"""AMX products: on an emulated tile unit, and on AMX where the machine has it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.ops import emulated_tiles, sanitized
from vllm_relay.ops.native import library as native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulated_tiles.missing() is not None, reason=str(emulated_tiles.missing())),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulated") / "kernels.so"
    emulated_tiles.build(path)
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiles") / "tile_unit_test"
    emulated_tiles.build_program(path, emulated_tiles.ISA, sanitized.FLAGS)
    return path


def test_tiles_and_products_on_them_are_plain_sums(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("palette", "palette is not 1"),
        ("reserved", "reserved bytes"),
        ("17 rows", "more than 16 rows"),
        ("65 bytes", "more than 64 bytes"),
        ("bytes without rows", "bytes without rows"),
        ("9 tiles", "more than 8 tiles"),
        ("tile without shape", "has no shape"),
        ("rows of C", "rows of C"),
        ("columns of C", "columns of C"),
        ("steps of A", "steps of A"),
        ("half a pair", "half a pair"),
        ("not configured", "before ldtilecfg"),
        ("not released", "without tilerelease"),
    ],
)
def test_a_use_on_which_a_processor_faults_ends_the_process(
    program: Path, rule: str, message: str
) -> None:
    done = subprocess.run([program, rule], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT and message in done.stderr


def test_the_instructions_are_the_compilers(tmp_path: Path) -> None:
    path = tmp_path / "tile_instructions_test"
    emulated_tiles.build_program(path, "amx_bf16", emulated_tiles.FLAGS)
    assert subprocess.run([path]).returncode == 0


def test_random_calls_agree_with_the_oracle(library: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.ops.fuzz_native", "--cases", "250"]
    done = subprocess.run(
        [*command, "--library", str(library), "--isa", emulated_tiles.ISA],
        cwd=sanitized.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("head_size", [32, 64, 96, 128])
def test_blocks_that_the_engine_lays_out_for_amx_are_multiplied_in_place(
    head_size: int, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms = pytest.importorskip("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        pytest.skip("needs the CPU engine")
    platforms.current_platform.import_kernels()
    from tests.unit.backend import test_cpu_packed

    kernels = native.Library(str(library))
    kernels.use_isa(emulated_tiles.ISA)
    monkeypatch.setattr(native, "library", lambda: kernels)
    test_cpu_packed.test_blocks_laid_out_for_amx_are_read_in_place(head_size)


def test_the_emulated_unit_is_in_no_wheel() -> None:
    sets = sanitized.setup_file()["instruction_sets"]("x86_64")
    names = [isa.name for isa in sets]
    assert "amx_bf16" in names and emulated_tiles.ISA not in names
