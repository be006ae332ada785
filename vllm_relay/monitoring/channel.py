"""Channel from an engine's workers to the processes that serve its metrics.

Each worker listens on an abstract Unix socket (unix(7)): no file is left behind, no step pays for
it, and nothing happens while nobody asks. Only processes of the same user get an answer.
"""

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from vllm_relay import metrics

# Environment variable that an engine's processes inherit: the part of their sockets' names that
# they have in common. Without vLLM's prefix, whose unknown variables it warns of.
KEY = "RELAY_SERVER"
# Seconds in which all workers have to answer.
PATIENCE = 0.1
_SOCKETS = Path("/proc/net/unix")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Report = dict[str, Any]


def open_channel() -> None:
    """Begin a channel for the engine that this process starts next."""
    os.environ[KEY] = secrets.token_hex(16)


def answer(name: str, report: Callable[[], Report]) -> None:
    """Answer each `ask` with ``report()``, in a thread, until this process ends.

    Without a channel nothing listens. ``name`` tells the workers of an engine apart.
    """
    if (key := os.environ.get(KEY)) is None:
        return
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0relay-{key}-{name}")
    listener.listen()
    threading.Thread(
        target=_serve, args=(listener, report), name="relay-metrics", daemon=True
    ).start()


def _serve(listener: socket.socket, report: Callable[[], Report]) -> None:
    while True:
        try:
            asking, _ = listener.accept()
        except OSError as error:
            metrics.say_once(f"its counters are no longer in /metrics: {error}")
            return
        with asking, suppress(Exception):  # who asks hears nothing, and asks again
            asking.settimeout(PATIENCE)
            if _user(asking) == os.getuid():
                asking.sendall(json.dumps(report()).encode())


def _user(connection: socket.socket) -> int:
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(given)[1])


def ask() -> dict[str, Report]:
    """Reports of the channel's workers, by name; those that do not answer in time are left out."""
    if (key := os.environ.get(KEY)) is None:
        return {}
    prefix = f"@relay-{key}-"
    names = {line.rpartition(" ")[2] for line in _SOCKETS.read_text().splitlines()}
    until = time.monotonic() + PATIENCE
    found: dict[str, Report] = {}
    with ExitStack() as stack:
        asked = {}
        for name in sorted(name for name in names if name.startswith(prefix)):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(PATIENCE)
            with suppress(OSError):
                connection.connect("\0" + name.removeprefix("@"))
                asked[name.removeprefix(prefix)] = connection
        for name, connection in asked.items():  # they answer side by side
            with suppress(OSError, ValueError):
                found[name] = json.loads(_read(connection, until))
    return found


def _read(connection: socket.socket, until: float) -> bytes:
    """All that is sent until then. Raises OSError for less."""
    parts: list[bytes] = []
    while True:
        connection.settimeout(max(0.0, until - time.monotonic()))
        if not (part := connection.recv(1 << 16)):
            return b"".join(parts)
        parts.append(part)
