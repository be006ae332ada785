"""Scratch folders in folders that others write to: nothing of theirs is touched or waited for."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.system_kv.files import time_limit
from vllm_relay.system_kv import scratch
from vllm_relay.system_kv.scratch import scratch_folder

HOLD = """
import sys, time
from pathlib import Path
from vllm_relay.system_kv.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "prompt-0").write_text("KV")
    print(folder, flush=True)
    time.sleep(600)
"""


def left_by_a_killed_build(where: Path) -> Path:
    code = textwrap.dedent(HOLD)
    child = subprocess.Popen([sys.executable, "-c", code, str(where)], stdout=-1, text=True)
    assert child.stdout is not None
    folder = Path(child.stdout.readline().strip())
    assert (folder / "prompt-0").exists()
    with scratch_folder(where):  # while it lives
        assert folder.exists()
    child.send_signal(signal.SIGKILL)
    child.wait()
    return folder


def test_a_build_removes_its_folder_and_what_a_killed_one_left(tmp_path: Path) -> None:
    old = left_by_a_killed_build(tmp_path)
    assert old.exists()
    with scratch_folder(tmp_path) as folder:
        assert not old.exists() and folder.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    trap = tmp_path / f"{scratch.SCRATCH}trap"
    trap.mkdir()
    (trap / "lock").symlink_to(victim)
    link = tmp_path / f"{scratch.SCRATCH}link"
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    with scratch_folder(tmp_path):
        pass
    assert victim.read_text() == "precious"
    assert trap.exists() and (tmp_path / "elsewhere" / "lock").exists()


def test_folders_of_other_owners_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / f"{scratch.SCRATCH}foreign"
    foreign.mkdir()
    (foreign / "lock").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with scratch_folder(tmp_path):
        pass
    assert (foreign / "lock").exists()


def test_nobody_can_make_a_build_wait(tmp_path: Path) -> None:
    held = tmp_path / f"{scratch.SCRATCH}held"
    held.mkdir()
    os.mkfifo(tmp_path / f"{scratch.SCRATCH}pipe")
    (held / "lock").touch()
    folder = os.open(tmp_path, os.O_RDONLY)
    with (held / "lock").open() as lock, time_limit(20):
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(folder, fcntl.LOCK_EX)
        with scratch_folder(tmp_path):
            assert held.exists()
    os.close(folder)
