"""Triton's interpreter, in runs that select nothing but the folders whose cases need it.

Triton reads TRITON_INTERPRET when a kernel is defined, those of its own library at import: a
process interprets all kernels or none. A run of interpreted folders alone sets the variable; in
every other run their tests are skipped, and compile cases are skipped where it is set.
"""

import os
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
INTERPRETED = (HERE / "interpreted", HERE / "cuda")

# Not every engine comes with Triton.
collect_ignore_glob = [] if find_spec("triton") else ["*/test_*.py"]


def is_interpreted(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in INTERPRETED)


def pytest_configure(config: pytest.Config) -> None:
    """Set the variable; nothing has imported Triton yet."""
    if all(is_interpreted(Path(arg.partition("::")[0]).resolve()) for arg in config.args):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if is_interpreted(item.path) and not interprets:
            reason = "needs Triton's interpreter: run this folder alone (tests/README.md)"
        elif item.path.is_relative_to(HERE / "compiled") and interprets:
            reason = "compiles kernels: run without TRITON_INTERPRET (tests/README.md)"
        else:
            continue
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of a launch run in order, the other way round or shuffled: a GPU promises none."""
    if not is_interpreted(request.path):
        return
    from triton.runtime import interpreter

    rng = np.random.default_rng(0)
    order = np.zeros(0, dtype=int)
    set_grid_idx = interpreter.InterpreterBuilder.set_grid_idx

    def in_any_order(self: Any, x: int, y: int, z: int) -> None:
        nonlocal order
        grid = self.grid_dim
        program = (x * grid[1] + y) * grid[2] + z
        if program == 0:  # of a new launch
            programs = np.arange(prod(grid))
            order = (programs, programs[::-1], rng.permutation(programs))[rng.integers(3)]
        set_grid_idx(self, *map(int, np.unravel_index(order[program], grid)))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", in_any_order)
