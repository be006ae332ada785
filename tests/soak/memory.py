"""Memory soak: relay in a cgroup of the KV cache, the bound that it states, and 1 GiB.

The engine runs in one process: steps of 8,192 tokens that are relayed, more prompts than the KV
cache holds, and decodes behind so many prefixes that their copies reach the bound; once with
``max_copy_gib`` set, once with what relay finds by itself. The cgroup is bound over the place where
vLLM looks for its limit. Failures: an out-of-memory kill, a limit above what is promised, a
fallback, copies that take less than 90 % of their bound. Needs a writable memory cgroup and
``unshare``, so root.

    python -m tests.soak --part memory
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.random_model import write_random_model
from tests.engine.engine import ROOT, environment

KV_GIB = 1
STEP_TOKENS, SHARED = 8192, 1024
# `max_copy_gib`, and the bound: copies, and partials of 8,192 tokens twice. Without the setting the
# bound is half of what Python, vLLM and the model leave of the second GiB, and it, too, is stated.
SETTINGS: tuple[tuple[float | None, float], ...] = ((0.75, 1.0), (None, 0.4))
CHUNKS = len(SETTINGS)


def run_chunk(chunk: int) -> dict[str, Any]:
    """The soak's row."""
    copy_gib, stated_gib = SETTINGS[chunk]
    limit = int((KV_GIB + stated_gib + 1) * 2**30)
    with tempfile.TemporaryDirectory() as name, _cgroup(limit) as group:
        model = write_random_model(Path(name, "model"), 8, 8, 128)
        script = Path(__file__).with_name("memory_run.py")
        result, given = f"{name}/result.json", json.dumps(copy_gib)
        with _watched(group) as anonymous:
            log = _run([sys.executable, str(script), str(model), result, given], group)
        done = Path(name, "result.json")
        found = json.loads(done.read_text()) if done.exists() else {}
        kills, peak = group.read_kills(), group.read_peak()
    stated = re.search(r"takes at most ([\d.]+) GiB per worker .*: ([\d.]+) GiB of packed", log)
    bound, copies = map(float, stated.groups() if stated else (0, 0))
    promised = KV_GIB + bound + 1
    ok = found.get("rows_of_256_queries", 0) >= 64 and found.get("fallbacks") == 0
    full = found.get("packed_bytes", 0) >= 0.9 * copies * 2**30 > 0
    failures = kills + (not ok) + (not full) + (limit > (promised + 0.005) * 2**30)
    if failures:
        print(log[-3000:], file=sys.stderr)
    return {
        "limit_bytes": limit,
        "peak_bytes": peak,
        "peak_anonymous_bytes": max(anonymous),
        "stated_gib": bound,
        "packed_gib": copies,
        **found,
        "out_of_memory_kills": kills,
        "failures": failures,
    }


class Group:
    """A cgroup of its own, of either version of the kernel's interface."""

    def __init__(self, limit: int) -> None:
        self.root = Path("/sys/fs/cgroup/memory")
        self.old = self.root.is_dir()
        if not self.old:
            self.root = self.root.parent
        self.path = self.root / f"vllm-relay-{os.getpid()}"
        self.path.mkdir()
        name = "memory.limit_in_bytes" if self.old else "memory.max"
        (self.path / name).write_text(str(limit))

    def read_peak(self) -> int:
        name = "memory.max_usage_in_bytes" if self.old else "memory.peak"
        return int((self.path / name).read_text())

    def read_anonymous(self) -> int:
        """Bytes of this moment without those of files, which can be dropped."""
        fields = (line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return int(dict(fields)["rss" if self.old else "anon"])

    def read_kills(self) -> int:
        name = "memory.oom_control" if self.old else "memory.events"
        fields = dict(line.split() for line in (self.path / name).read_text().splitlines())
        return int(fields["oom_kill"])


@contextmanager
def _cgroup(limit: int) -> Iterator[Group]:
    group = Group(limit)
    try:
        yield group
    finally:
        group.path.rmdir()


@contextmanager
def _watched(group: Group) -> Iterator[list[int]]:
    """Anonymous bytes, five times a second."""
    seen, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            seen.append(group.read_anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _run(command: list[str], group: Group) -> str:
    """The log of a command in the cgroup, which it sees as the machine's."""
    inside = f'mount --bind "{group.path}" "{group.root}" && exec "$@"'
    procs = group.path / "cgroup.procs"
    shell = f'echo $$ > "{procs}" && exec unshare -m sh -c \'{inside}\' sh "$@"'
    env = environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE=str(KV_GIB), OMP_NUM_THREADS="2"
    )
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *command],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    return done.stdout
