"""For all tests: no model hub, no usage reports, and a reason shown where a GPU is missing."""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports vLLM or huggingface_hub: both read these at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Test processes run side by side. Several threads of each wait for one another at the end of every
# parallel loop: an engine takes four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every engine imports thousands of modules; compiled once, in the first.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# With several test processes: engines pin themselves to cores, all to the same ones unless told.
_worker = os.environ.get("PYTEST_XDIST_WORKER")
if _worker:
    _cores = sorted(os.sched_getaffinity(0))
    _core = _cores[int(_worker.removeprefix("gw")) % len(_cores)]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(_core))


@pytest.fixture(scope="module", autouse=True)
def environment_of_a_file() -> Iterator[None]:
    """Commands that run in a test's own process set variables; the next file does not see them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def same_random_tensors() -> None:
    """A test's random tensors do not depend on the tests before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """Keep what engines measure at their start out of the user's cache."""
    folder = tempfile.TemporaryDirectory(prefix="vllm-relay-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["VLLM_RELAY_DEVICES"] = str(Path(folder.name) / "devices.json")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with most slow tests first; skip the tests marked ``gpu`` without a CUDA GPU.

    A long file started last would leave the other process without work.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch sees none"))
