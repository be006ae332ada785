"""The folder of ``remember``: system-KV files named by their content, the hottest changed last.

Several servers may share it. A file appears whole, equal names have equal content, and the times of
change order the files from the coldest to the hottest.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3

from vllm_relay.system_kv.file import SystemKVError

# Other files in the folder are left alone.
_PATTERN = "hot-*.relay"


@dataclass
class Round:
    """One round of saving: names of its files, and the reason why some are missing, or None."""

    number: int
    names: list[str] = field(default_factory=list)
    problem: str | None = None


def file_name(identity: Mapping[str, Any], token_ids: Sequence[int]) -> str:
    """The name of a prefix's file; ``identity``: the fields of the engine's `Identity`."""
    compared = {key: value for key, value in identity.items() if key != "model"}
    content = json.dumps([compared, list(token_ids)], sort_keys=True)
    return f"hot-{blake3.blake3(content.encode()).hexdigest()[:32]}.relay"


def prepare(folder: Path) -> None:
    """Make the folder, mode 0700 if it is new. Raises SystemKVError if nothing can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".vllm-relay-try-"):
            pass
    except OSError as error:
        raise SystemKVError(
            f"system_kv.remember {folder}: cannot be written: {error.strerror}"
        ) from None


def hottest_first(folder: Path) -> list[Path]:
    """The remembered files. Raises OSError if the folder cannot be read."""
    found = []
    for path in folder.glob(_PATTERN):
        with suppress(FileNotFoundError):  # another server made room
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def mark(path: Path, hot_at: float) -> bool:
    """Set the time that orders a file; False if there is none. Raises OSError on failure."""
    try:
        os.utime(path, (hot_at, hot_at))
    except FileNotFoundError:
        return False
    return True


def make_room(folder: Path, size: int, limit: int) -> None:
    """Remove the coldest files until ``size`` bytes more are ``limit`` at most.

    Raises:
        OSError: the folder cannot be read, or a file not removed.
    """
    kept = size
    for path in hottest_first(folder):
        with suppress(FileNotFoundError):
            if (kept := kept + path.stat().st_size) > limit:
                path.unlink()
