"""For all tests: no model hub, no usage reports, and a reason shown where a GPU is missing."""

import os
from collections.abc import Iterator

import pytest

# Before anything imports vLLM or huggingface_hub: both read these at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
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


# Files that take longest, one of which must not be what a process is still at when the other has
# nothing left to do.
FIRST = (
    "test_parity.py",
    "test_system_kv.py",
    "test_system_kv_answers.py",
    "test_select.py",
    "test_comparisons.py",
    "test_serving_bench.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; skip the tests marked ``gpu`` without a CUDA GPU."""
    items.sort(key=lambda x: FIRST.index(x.path.name) if x.path.name in FIRST else len(FIRST))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch sees none"))
