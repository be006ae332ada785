"""Kernels compiled by the installed Triton or an older one."""

import sys

import pytest

from tools.engine_sources import DEFAULT_TARGET, TRITON


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--triton", choices=[TRITON], help="release to compile with")


def pytest_configure(config: pytest.Config) -> None:
    """Put the release in front of the installed one; nothing has imported Triton yet."""
    version = config.getoption("--triton")
    if version is None:
        return
    folder = DEFAULT_TARGET / f"triton-{version}"
    if not folder.is_dir():
        raise pytest.UsageError(f"Triton {version} is not in {folder.parent.name}: make sources")
    sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True, scope="session")
def release(pytestconfig: pytest.Config) -> None:
    """Triton is the release that was asked for."""
    import triton

    assert pytestconfig.getoption("--triton") in (None, triton.__version__)
