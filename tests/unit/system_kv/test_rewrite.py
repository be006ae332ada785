"""A failure while system KVs are written again gives them up; the engine goes on."""

from typing import Any

import pytest

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
def test_a_failure_is_a_reason(error: Exception, reason: str, monkeypatch: Any) -> None:
    def write(self: Writer) -> None:
        raise error

    monkeypatch.setattr(writer, "_fingerprint", lambda: None)
    monkeypatch.setattr(Writer, "write", write)
    assert Writer(None, [], 16, []).rewrite() == reason
