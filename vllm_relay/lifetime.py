"""The lifetime of a command: what it starts ends with it, however it ends."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Environment variable that children inherit: process id of the command. Without vLLM's prefix:
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

    # Not SIGINT of a job in the background, which is ignored there.
    numbers = [signal.SIGTERM, signal.SIGALRM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, end) for number in numbers}
    first = COMMAND not in os.environ
    if first:
        os.environ[COMMAND] = str(os.getpid())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if first:
            del os.environ[COMMAND]


def follow() -> None:
    """End this process when the command ends that it is of; nothing outside of commands."""
    command = os.environ.get(COMMAND, "")
    if not command.isdecimal() or int(command) == os.getpid():
        return
    name = "relay-follow"
    if any(thread.name == name for thread in threading.enumerate()):
        return
    threading.Thread(target=_end_with, args=(int(command),), name=name, daemon=True).start()


def _end_with(pid: int) -> None:
    try:
        command = os.pidfd_open(pid)
    except ProcessLookupError:
        pass  # ended already
    except (OSError, AttributeError):
        return  # before Linux 5.3
    else:
        waiting = select.poll()
        waiting.register(command, select.POLLIN)
        waiting.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
