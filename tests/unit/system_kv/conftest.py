"""Fixtures of the tests of system KVs."""

import pytest

from vllm_relay import metrics


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines said once, and warnings."""
    said: list[str] = []
    monkeypatch.setattr(metrics, "say_once", lambda text, *a: said.append(text))
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *args: said.append(text % args))
    return said
