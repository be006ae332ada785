"""The channel between workers and those who serve their metrics, between real processes."""

import os
import socket
import time

import pytest

from tests.unit.monitoring.workers import heard, worker
from vllm_relay.monitoring import channel


@pytest.fixture(autouse=True)
def new_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(channel.KEY, "")  # put back after the test
    channel.open_channel()


def test_all_workers_of_a_channel_answer() -> None:
    assert channel.ask() == {}
    with worker("0-0", '{"engine": 0}'), worker("1-0", '{"engine": 1}'):
        assert heard(2) == {"0-0": {"engine": 0}, "1-0": {"engine": 1}}


def test_workers_of_another_engine_are_not_asked() -> None:
    with worker("0-0", '{"engine": 0}'):
        heard(1)
        channel.open_channel()
        assert channel.ask() == {}


def test_a_worker_that_ended_is_gone() -> None:
    with worker("0-0", "{}") as child:
        heard(1)
        child.kill()
        child.wait()
        assert channel.ask() == {}


def test_a_worker_that_does_not_answer_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PATIENCE", 2.0)
    with worker("0-0", "{}", seconds=3600), worker("1-0", '{"engine": 1}'):
        started = time.monotonic()
        assert channel.ask() == {"1-0": {"engine": 1}}
        assert time.monotonic() - started < 60  # both would be asked for an hour


def test_an_answer_that_is_no_json_is_left_out() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0relay-{os.environ[channel.KEY]}-0-0")
        listener.listen()
        assert channel.ask() == {}  # it is connected, and nothing comes


def test_without_a_channel_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(channel.KEY)
    channel.answer("0-0", dict)
    assert channel.ask() == {}
    assert "@relay--0-0" not in channel._SOCKETS.read_text()
