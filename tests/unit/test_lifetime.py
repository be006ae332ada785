"""Commands that are ended or killed leave no process and no KV."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engine.engine import environment
from tests.unit.system_kv.files import time_limit
from vllm_relay import lifetime
from vllm_relay.system_kv.scratch import scratch_folder

# A command and, in the way of vLLM's engine, a process of a process of it.
COMMAND = """
import os, subprocess, sys, time
from vllm_relay.lifetime import ended_in_order
with ended_in_order():
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
    time.sleep(600)
"""
CHILD = """
import subprocess, sys, time
import vllm_relay
vllm_relay.register_name()
if sys.argv[1]:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], ""], start_new_session=True)
else:
    print("ready", flush=True)
time.sleep(600)
"""
# `vllm-relay build` whose engine computes for ever.
BUILD = """
import sys, time
from types import SimpleNamespace
import vllm_relay.cli.system_kv as command
from vllm_relay.system_kv import build

class Builder:
    tokenizer = None

    def __init__(self, engine_args, scratch, chat_template):
        (scratch / "prompt-0").write_text("KV")
        print("ready", flush=True)
        time.sleep(600)

engine_args = SimpleNamespace(distributed_executor_backend=None)
command.read_engine_args, build.Builder = lambda *_: engine_args, Builder
from vllm_relay.cli import main
main()
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    env = environment()
    env.pop(lifetime.COMMAND, None)
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=env, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_processes_of_a_killed_command_end() -> None:
    command = start(COMMAND, CHILD, CHILD)
    command.kill()
    command.wait()
    assert command.stdout is not None
    with time_limit(60):  # until the last process that has the pipe has ended
        assert command.stdout.read() == ""


def test_a_build_that_is_told_to_end_leaves_no_kv(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    given = ("--token-ids", str(tmp_path / "ids.json"), "-o", str(tmp_path / "out" / "a.relay"))
    build = start(BUILD, "build", "--model", "m", *given)
    assert list((tmp_path / "out").iterdir())
    build.send_signal(signal.SIGTERM)
    assert build.wait(60) == 143
    assert not list((tmp_path / "out").iterdir())


def test_a_forked_process_of_a_killed_command_ends() -> None:
    forked = """
import os, time
from vllm_relay.lifetime import ended_in_order
with ended_in_order():
    if os.fork() == 0:
        print("ready", flush=True)
    time.sleep(600)
"""
    command = start(forked)
    command.kill()
    command.wait()
    assert command.stdout is not None
    with time_limit(60):
        assert command.stdout.read() == ""


def test_a_forked_process_ends_on_the_first_signal() -> None:
    """Whatever it does with exceptions."""
    forked = """
import os, signal, time
from vllm_relay.lifetime import ended_in_order
with ended_in_order():
    if not (child := os.fork()):
        print("ready", flush=True)
        while True:
            try:
                time.sleep(600)
            except SystemExit:
                pass
    time.sleep(1)
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], flush=True)
"""
    command = start(forked)
    assert command.stdout is not None
    try:
        with time_limit(60):
            assert command.stdout.read() == f"{signal.SIGTERM.value}\n"
    finally:
        command.kill()


@pytest.mark.parametrize("here", [True, False])
def test_a_variable_that_outlived_its_command_ends_nothing(here: bool) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    namespace = lifetime._namespace() if here else "pid:[1]"
    command = f"{ended.pid} {namespace} 1"
    child = "import sys, time, vllm_relay; vllm_relay.register_name(); time.sleep(3); print(1)"
    parent = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    env = environment(**{lifetime.COMMAND: command})
    done = subprocess.run(
        [sys.executable, "-c", parent], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_a_removal_that_takes_long_is_not_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "AGAIN", 0.05)
    unlink = Path.unlink

    def slowly(path: Path) -> None:
        time.sleep(0.1)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", slowly)
    with pytest.raises(SystemExit), lifetime.ended_in_order(), scratch_folder(tmp_path) as folder:
        for name in "abc":
            (folder / name).write_text("KV")
        os.kill(os.getpid(), signal.SIGTERM)
    assert not list(tmp_path.iterdir())


def test_a_command_of_a_command_ends_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lifetime.COMMAND, raising=False)
    with lifetime.ended_in_order():
        assert os.environ[lifetime.COMMAND] == lifetime._name(os.getpid())
    assert lifetime.COMMAND not in os.environ
    monkeypatch.setenv(lifetime.COMMAND, "1")
    with lifetime.ended_in_order():
        assert os.environ[lifetime.COMMAND] == "1"
    assert os.environ[lifetime.COMMAND] == "1"


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_that_gets_lost_is_raised_again(
    number: signal.Signals, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "AGAIN", 0.1)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(x) for x in (signal.SIGTERM, signal.SIGALRM)]
    with pytest.raises(raised), lifetime.ended_in_order():
        with suppress(BaseException):
            os.kill(os.getpid(), number)
            time.sleep(60)
        time.sleep(60)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert [signal.getsignal(x) for x in (signal.SIGTERM, signal.SIGALRM)] == before
    signal.signal(signal.SIGINT, handler)
