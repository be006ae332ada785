"""The quick check of a GPU with torch.cuda stubbed: the lines that a GPU would run first."""

import csv
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.attention.backends import flash_attn

from benchmarks import gpu_check
from benchmarks.gpu import flash_check, kernels
from tests import reference_flash
from vllm_relay.backend import self_test


class OnCpu(TorchFunctionMode):
    """Tensors of the device "cuda" are on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        moved = [self._moved(x) for x in args]
        return function(*moved, **{name: self._moved(x) for name, x in (kwargs or {}).items()})

    @staticmethod
    def _moved(x: Any) -> Any:
        return "cpu" if isinstance(x, (str, torch.device)) and str(x) == "cuda" else x


class Anything:
    """A stream, an event or a graph: every method does nothing and returns a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 1.0


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda: "dry run",
        "get_device_capability": lambda: (9, 0),
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
        "current_stream": Anything,
        "stream": lambda stream: nullcontext(),
        "graph": lambda graph: nullcontext(),
        "is_current_stream_capturing": lambda: False,
        **dict.fromkeys(("Stream", "Event", "CUDAGraph"), Anything),
        **dict.fromkeys(("synchronize", "empty_cache", "_sleep"), lambda *args: None),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu", made=torch.Generator: made("cpu"))
    reference_flash.install(lambda name, value: monkeypatch.setattr(flash_attn, name, value, False))

    def flash_attention(version: int) -> Any:
        return lambda **kwargs: reference_flash.flash_attn_varlen_func(fa_version=version, **kwargs)

    for module in (flash_check, kernels):
        monkeypatch.setattr(module, "flash_attention", flash_attention)


def test_the_quick_kernels_run_to_their_end(stubbed, tmp_path, monkeypatch) -> None:
    # Less of each, since the interpreter is slow.
    monkeypatch.setattr(kernels, "PLANS", ((12, 9, 1), (9, 5, 0)))
    monkeypatch.setattr(kernels, "SELF_TESTS", ((4, 2, 32, *kernels.SELF_TESTS[1][3:]),))
    path, report = tmp_path / "kernels.csv", tmp_path / "report.json"
    given = ["kernels", "--quick", "--csv", str(path), "--report", str(report)]
    args = gpu_check.parse([*given, "--until", str(time.time() + 3600)])
    self_test.run.cache_clear()
    with OnCpu():
        status = gpu_check.run_part("kernels", args)
    self_test.run.cache_clear()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["failure"] for row in rows] == [""] * len(rows)
    assert len(rows) == len(list(kernels.cases(quick=True))) and status == 0
    assert {row["device"] for row in rows} == {"dry run"} and report.read_text() == "[]"
