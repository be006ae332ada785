"""Memory soak: relay in a cgroup of the KV cache, the bound that it states, and 1 GiB.

The engine runs in one process: steps of 8,192 tokens that are relayed, more prompts than the KV
cache holds, copies of six prefixes. The cgroup is bound over the place where vLLM looks for its
limit. An out-of-memory kill, and a limit above what is promised, are failures. Needs a writable
memory cgroup and ``unshare``, so root.

    python -m tests.soak --part memory
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.random_model import write_random_model
from tests.engine.engine import ROOT, environment

CHUNKS = 1
KV_GIB, COPY_GIB = 1, 0.75
STEP_TOKENS, SHARED = 8192, 4096
# Copies of packed segments, and partials of 8,192 tokens twice.
_STATED_GIB = 1.0


def run_chunk(chunk: int) -> dict[str, Any]:
    """The soak's row."""
    limit = int((KV_GIB + _STATED_GIB + 1) * 2**30)
    with tempfile.TemporaryDirectory() as name, _cgroup(limit) as group:
        model = write_random_model(Path(name, "model"), 8, 8, 128)
        script = Path(__file__).with_name("memory_run.py")
        command = [sys.executable, str(script), str(model), f"{name}/result.json"]
        log = _run(command, group)
        done = Path(name, "result.json")
        found = json.loads(done.read_text()) if done.exists() else {}
        kills, peak = group.read_kills(), group.read_peak()
    stated = re.search(r"takes at most ([\d.]+) GiB per worker", log)
    promised = KV_GIB + float(stated[1] if stated else 0) + 1
    ok = found.get("rows_of_256_queries", 0) >= 64 and found.get("fallbacks") == 0
    failures = kills + (not ok) + (limit > (promised + 0.005) * 2**30)
    if failures:
        print(log[-3000:], file=sys.stderr)
    return {
        "limit_bytes": limit,
        "peak_bytes": peak,
        "stated_gib": promised - KV_GIB - 1,
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
