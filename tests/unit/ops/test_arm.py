"""The Arm kernels under emulation: against the oracle, their choice, memory beyond a buffer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.ops import call_buffers, fuzz_arm, fuzz_native
from tests.unit.ops.emulated import EmulatedLibrary
from vllm_relay.ops import providers, system_attention
from vllm_relay.ops.native import library as native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(fuzz_arm.missing() is not None, reason=str(fuzz_arm.missing())),
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arm") / "runner"
    fuzz_arm.build(path, [])
    return path


@pytest.fixture
def library(runner: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedLibrary]:
    emulated = fuzz_arm.emulated(runner)
    monkeypatch.setattr(native, "library", lambda: emulated)
    yield emulated
    emulated.close()


@pytest.mark.parametrize("isa", ["neon_bf16", "neon"])
def test_random_calls_agree_with_the_oracle(isa: str, library: EmulatedLibrary) -> None:
    library.use_isa(isa)
    assert fuzz_native.run(100, 0) == []
    assert library.isa == isa


@pytest.mark.parametrize(
    ("cpu", "isas"),
    [("max", ["neon_bf16", "neon", "portable"]), ("cortex-a72", ["neon", "portable"])],
)
def test_the_machine_decides_on_bf16(cpu: str, isas: list[str], runner: Path) -> None:
    library = fuzz_arm.emulated(runner, cpu)
    assert library.isas == isas
    assert library.isa == isas[0]
    library.close()


def test_no_panels_are_taken_for_the_engines_amx_blocks(library: EmulatedLibrary) -> None:
    for isa in library.isas:
        library.use_isa(isa)
        assert not any(map(native.packs_pairs_of_16, native.DTYPES))


def test_a_read_beyond_a_buffer_ends_the_emulated_process_and_the_next_call_has_another(
    library: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = torch.ones(3, 1, 32), torch.ones(64, 1, 32)
    with providers.use("system", "native"):
        with monkeypatch.context() as patch:
            patch.setattr(call_buffers, "SIZES", (2, 2, 3))  # float32 buffers cut short
            with pytest.raises(RuntimeError, match="ended with status -11 in attend"):
                system_attention(q, k, k)
        assert torch.equal(system_attention(q, k, k)[0], q)
