"""Files that are replaced whole, by one process at a time."""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Seconds to wait for another process that writes, or measures what it writes.
_LOCK_SECONDS = 30.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes that ask from the body: none is lost if two come at once.

    Anybody who reads the folder can hold its lock: after `_LOCK_SECONDS` the body runs without it.
    """
    lock, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + _LOCK_SECONDS
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside ``path`` that takes its place in the end, if it was written.

    Raises:
        OSError: there cannot be a file of that name.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: is not a file")
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        draft.touch(exist_ok=False)  # which follows no link
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from None
    try:
        yield draft
        if draft.stat().st_size:
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
