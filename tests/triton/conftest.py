"""Triton's interpreter, in runs that select nothing but the folders whose cases need it.

Triton reads TRITON_INTERPRET when a kernel is defined, those of its own library at import: a
process interprets all kernels or none. A run of interpreted folders alone sets the variable; in
every other run their tests are skipped, and compile cases are skipped where it is set.
"""

import os
from importlib.util import find_spec
from pathlib import Path

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
