"""`tools/make_wheels.py`: instruction sets that a wheel has to carry."""

import pytest

from tests.unit.ops import sanitized
from tools import make_wheels


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_sets_are_those_that_the_build_compiles(machine: str) -> None:
    compiled = {isa.name for isa in sanitized.setup_file()["instruction_sets"](machine)}
    assert set(make_wheels.instruction_sets(machine)) == compiled


def test_a_set_that_the_library_lacks_is_found() -> None:
    library = b"\0relay_kernels_avx512_bf16\0relay_kernels_portable\0"
    assert make_wheels.missing(library, ["avx512", "avx512_bf16", "portable"]) == ["avx512"]
