"""The folder of a build's unfinished files, removed with the build, however it ends."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_relay import lifetime

# Begins the names of such folders.
SCRATCH = ".vllm-relay-build-"


@contextmanager
def scratch_folder(where: Path) -> Iterator[Path]:
    """A folder for unfinished files, on the file system of the finished ones, mode 0700.

    It is removed at the end; the next build removes what a killed one left. ``where`` may be
    anybody's, such as the system's temporary folder: what others put there is left alone.
    """
    where.mkdir(parents=True, exist_ok=True)
    for old in where.glob(SCRATCH + "*"):
        with suppress(OSError):
            _remove_left(old)
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=where))
    try:
        # Named when it is held: a build that finds it must not take it before.
        with (folder / "unlocked").open("x") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(folder / "unlocked", folder / "lock")
            yield folder
    finally:
        lifetime.unwind()
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a scratch folder, its lock last: without it a build would not know the rest."""
    for path in folder.iterdir():
        if path.name != "lock":
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_left(folder: Path) -> None:
    """Remove a scratch folder of ours whose build is gone. Raises OSError where it is not."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    lock = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    finally:
        os.close(lock)
