"""The CUDA backend on CPU tensors, with the classes of the installed vLLM or a CUDA release."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tools.engine_sources import WHEELS, folder_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm", choices=list(WHEELS), help="CUDA release whose classes to test against"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Put the release in front of the installed engine; nothing has imported vLLM yet."""
    version = config.getoption("--vllm")
    if version is None:
        return
    folder = folder_of(version)
    if not folder.is_dir():
        raise pytest.UsageError(f"vLLM {version} is not in {folder.parent.name}: make sources")
    sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True, scope="session")
def release(pytestconfig: pytest.Config) -> None:
    """vLLM is the release that was asked for."""
    from vllm.version import __version__

    assert pytestconfig.getoption("--vllm") in (None, __version__)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 in plain torch; nothing said and nothing counted so far."""
    from tests.triton.cuda.cuda_cases import install
    from vllm_relay import metrics

    install(monkeypatch)
    monkeypatch.setattr(metrics, "_said", set())
    monkeypatch.setattr(metrics, "_devices", [])
    monkeypatch.setattr(metrics, "report_at_exit", lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where configurations keep their model."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def bench(folder: Path) -> Any:
    from tests.triton.cuda.cuda_bench import Bench, make_config

    return Bench(make_config(folder))
