"""A failure while system KVs are written again gives them up; the engine goes on."""

from collections import Counter
from typing import Any

import pytest

from vllm_relay import metrics
from vllm_relay.system_kv import writer
from vllm_relay.system_kv.writer import Writer


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
    assert Writer(None, [], 16, []).rewrite() == reason
    assert metrics.counters()["fallbacks_loading"] == 1
