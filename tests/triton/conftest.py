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
import torch

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
def patched_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch patches triton.language once per module; the interpreter does with every call of a
    device function, which takes a quarter of its time and finds nothing left to patch."""
    if not is_interpreted(request.path):
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()
    call = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return call(self, *args, **kwargs)

    def patch_once(fn: Any) -> Any:
        if fn.__module__ in patched:
            return None
        patched.add(fn.__module__)
        return patch(fn)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


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


@pytest.fixture(autouse=True)
def in_bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads and stores outside of a launch's tensors fail; a GPU would read something."""
    if not is_interpreted(request.path):
        return
    from triton.runtime import interpreter

    extents = np.zeros((0, 2), dtype=np.uint64)

    def extents_of(arg: Any) -> list[tuple[int, int]]:
        if isinstance(arg, tuple):
            return [extent for part in arg for extent in extents_of(part)]
        if not isinstance(arg, torch.Tensor) or not arg.numel():
            return []
        last = sum((n - 1) * stride for n, stride in zip(arg.shape, arg.stride(), strict=True))
        return [(arg.data_ptr(), arg.data_ptr() + (last + 1) * arg.itemsize)]

    call = interpreter.GridExecutor.__call__

    def checked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal extents
        found = sorted(extents_of((*args, *kwargs.values())))
        extents = np.array(found, dtype=np.uint64).reshape(-1, 2)
        return call(self, *args, **kwargs)

    def check(pointers: np.ndarray, mask: np.ndarray) -> None:
        used = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        inside = (extents[:, 0] <= used[:, None]) & (used[:, None] < extents[:, 1])
        assert inside.any(1).all(), "a kernel leaves its tensors"

    def checked(access: Any, pointers: int, mask: int) -> Any:
        """An access of the interpreter, checked; where its arguments have pointers and mask."""

        def call_checked(self: Any, *args: Any) -> Any:
            check(args[pointers].data, args[mask].data)
            return access(self, *args)

        return call_checked

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", checked_call)
    builder = interpreter.InterpreterBuilder
    for name, *at in (
        ("create_masked_load", 0, 1), ("create_masked_store", 0, 2), ("create_atomic_rmw", 1, 3)
    ):  # fmt: skip
        monkeypatch.setattr(builder, name, checked(getattr(builder, name), *at))
