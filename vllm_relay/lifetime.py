"""The lifetime of a command: what it starts ends with it, however it ends."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Environment variable that children inherit: `_name` of the command. Without vLLM's prefix:
# variables with it reach workers on other machines.
COMMAND = "RELAY_COMMAND"
# Seconds until a signal is raised again: what it raises can get lost while vLLM starts an engine.
AGAIN = 8.0
# Seconds between SIGTERM and SIGKILL for a process whose command has ended.
GRACE = 10.0


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Ends the body on a signal, so that it stops its children and removes unfinished files.

    SIGTERM becomes SystemExit (143), SIGINT is KeyboardInterrupt. vLLM's processes that the body
    starts end by themselves if this process is killed, see `follow`. In a command that another
    command started they end with the first one.
    """
    told = 0

    def end(number: int, frame: object) -> None:
        nonlocal told
        told = told or number
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
        if told == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(143)

    def start_child() -> None:
        """Signals end a forked process as they ended this one before the body."""
        for number, handler in before.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)
        follow()

    # Not SIGINT of a job in the background, which is ignored there.
    numbers = [signal.SIGTERM, signal.SIGALRM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, end) for number in numbers}
    first = COMMAND not in os.environ
    if first:
        os.environ[COMMAND] = _name(os.getpid()) or ""
    os.register_at_fork(after_in_child=start_child)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if first:
            del os.environ[COMMAND]


def unwind() -> None:
    """Raise a signal no more: what has begun to stop takes its time."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def follow() -> None:
    """End this process when the command ends that it is of; nothing outside of commands."""
    command = os.environ.get(COMMAND, "")
    pid, _, home = command.partition(" ")
    if not pid.isdecimal() or int(pid) == os.getpid() or home.partition(" ")[0] != _namespace():
        return
    thread = "relay-follow"
    if all(one.name != thread for one in threading.enumerate()):
        threading.Thread(target=_end_with, args=(command,), name=thread, daemon=True).start()


def _name(pid: int) -> str | None:
    """Process id, namespace of process ids, and start of a process; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    start = stat.rpartition(")")[2].split()[19]
    return f"{pid} {_namespace()} {start}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def _end_with(command: str) -> None:
    """Wait for the end of a command, then end this process."""
    pid = int(command.partition(" ")[0])
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        handle = None
    except (OSError, AttributeError):
        return  # before Linux 5.3
    if handle is not None and _name(pid) == command:
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        waiting.poll()
    elif _is_named_by_parent(command):
        return  # the variable outlived its command, or the parent ends and takes this one along
    print("vllm-relay: the command of this process has ended", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_named_by_parent(command: str) -> bool:
    try:
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{COMMAND}={command}".encode() in variables
