"""A failure while system KVs are written again gives them up; the engine goes on."""

import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_relay import compat, metrics
from vllm_relay.system_kv import writer
from vllm_relay.system_kv.writer import Writer


def _model(layer: torch.nn.Module, monkeypatch: Any) -> None:
    runner = SimpleNamespace(get_model=lambda: layer)
    monkeypatch.setattr(compat, "worker", lambda: SimpleNamespace(model_runner=runner))


def test_weights_that_were_replaced_are_seen_and_not_kept(monkeypatch: Any) -> None:
    layer = torch.nn.Module()
    _model(layer, monkeypatch)

    def load() -> weakref.ref[Any]:
        packed = torch.zeros(3)
        layer.cpu_linear = lambda x: x @ packed
        return weakref.ref(packed)

    first = load()
    before = writer._fingerprint()
    assert writer._fingerprint() == before
    load()
    assert first() is None and writer._fingerprint() != before


def test_weights_that_begin_anywhere_in_their_storage(monkeypatch: Any) -> None:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(40_001).bfloat16()[1:], requires_grad=False)
    _model(layer, monkeypatch)
    before = writer._fingerprint()
    layer.weight.data[-1] = 1
    assert writer._fingerprint() != before


def test_weights_that_cannot_be_read_are_not_taken_for_the_same(monkeypatch: Any) -> None:
    layer, model = torch.nn.Linear(2, 2), torch.nn.Module()
    layer.quant_method, layer.weight, model.mlp = object(), None, layer  # as an int8 layer's
    _model(model, monkeypatch)
    with pytest.raises(RuntimeError, match=r"^mlp keeps its weights where they cannot be read$"):
        writer._fingerprint()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(3,), (300, 512), (7, 40961)], ids=str)
def test_one_changed_weight_is_seen(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: Any
) -> None:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)
    flat = layer.weight.data.view(-1)
    flat[0], flat[1] = 1, 2
    _model(layer, monkeypatch)
    before = writer._fingerprint()
    assert writer._fingerprint() == before
    for at in (0, len(flat) // 2 + 1, len(flat) - 1):
        kept = flat[at].clone()
        flat.view(torch.uint8)[at * dtype.itemsize] ^= 1
        assert writer._fingerprint() != before
        flat[at] = kept
    flat[[0, 1]] = flat[[1, 0]]  # in another order
    assert writer._fingerprint() != before


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError("out of\nmemory"), "out of memory"),
        (OSError("gone"), "gone"),
    ],
)
@pytest.mark.parametrize(
    ("owner", "name"), [(Writer, "forget"), (writer, "_fingerprint"), (Writer, "write")]
)
def test_a_failure_is_a_reason_and_is_counted(
    owner: Any, name: str, error: Exception, reason: str, monkeypatch: Any
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(metrics, "_fallbacks", Counter())
    monkeypatch.setattr(writer, "_fingerprint", lambda: None)
    monkeypatch.setattr(owner, name, fail)
    assert Writer(None, [], [], []).rewrite(1) == reason
    assert metrics.counters()["fallbacks_loading"] == 1


def test_weights_are_compared_before_the_first_request_and_nothing_is_written(
    monkeypatch: Any,
) -> None:
    layer = torch.nn.Linear(2, 2)
    _model(layer, monkeypatch)
    made = Writer(None, [], [], [])
    made._weights = writer._fingerprint()
    monkeypatch.setattr(Writer, "write", None)
    assert made.rewrite(0) is None
    layer.weight.data.mul_(2)
    assert made.rewrite(0) == "the model's weights were changed"
    made._weights = writer._UNREADABLE  # of which the log has told
    assert made.rewrite(0) is None
