"""Kill matrix: the commands and servers, ended in six ways at moments of all their life.

{SIGKILL, SIGTERM, SIGINT, a limit on the size of files, a read-only folder, no HOME} of
{`vllm-relay build`, `vllm serve --attention-backend relay`, half of them with a system KV,
`vllm-relay calibrate`, `vllm-relay bench`}. Two run side by side, each in a session and a folder of
its own. The moment is drawn over the life of an undisturbed run, and beyond it. The last three ways
go on to a signal, too, if the command has not ended by itself.

SIGINT goes to the whole group, as from a terminal. SIGKILL goes to the command alone, but to a
server's whole group, as from a container's or a service's end: vLLM's own engine outlives a front
end that is killed alone, with relay and without. A server that lives 30 s after SIGTERM or SIGINT
is killed so, too (``killed_later``), as a service manager does: vLLM's front end, ended while it
waits for the first word of its engine, waits on, with relay and without.

Failures, per kill: the system-KV file is neither whole nor absent; ``devices.json`` is not whole; a
process of it lives 30 s later, or its port is open; the folder or the temporary folder has a file
that is not documented (after SIGKILL and under a limit on files: a scratch folder until the next
build, a draft of ``devices.json``, a folder of logs); a command of ours ends with an error that is
not one line. Per chunk: one more run, undisturbed, does not answer, or leaves more than its file.

    python -m tests.soak --part kills
"""

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random, SystemRandom
from typing import Any
from unittest import mock

import psutil

from benchmarks.harness import random_model
from tests.engine.engine import SMOLLM2, environment
from vllm_relay import lifetime
from vllm_relay.serving.processes import beside_python, free_port
from vllm_relay.sharing.cost_store import SHIPPED, load
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile

# Kind -> kills per chunk; chunk i is of kind i modulo their number.
KILLS = {"build": 112, "serve": 21, "calibrate": 14, "bench": 7}
CHUNKS = 8
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
WAYS = (*SIGNALS, "fsize", "read-only", "no-home")
GONE_S = 30.0
RESTART = "restart"
UNDISTURBED_S = 300.0
WARM_UPS = 1
PROMPT = "You are a careful assistant. Answer in one short sentence. " * 25
OPTIONS = ("--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager")
OPTIONS += ("--num-gpu-blocks-override", "64", "--block-size", "32")


def run_chunk(chunk: int) -> dict[str, Any]:
    """The soak's row of one chunk."""
    kind = list(KILLS)[chunk % len(KILLS)]
    return kill(kind, KILLS[kind], seed=chunk)


def kill(
    kind: str, kills: int, *, seed: int, ways: tuple[str, ...] = WAYS, **env: str
) -> dict[str, Any]:
    """So many kills of one kind, two side by side; the row of a chunk.

    env: more environment of all processes.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a job in the background passes it on
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with ThreadPoolExecutor(2) as pool:
        first = _life(kind)
        slots = [Slot(kind, Random(f"{seed}.{i}"), first, ways, core, env)
                 for i, core in enumerate(_cores())]  # fmt: skip
        share = [kills // len(slots) + (i < kills % len(slots)) for i in range(len(slots))]
        rows = list(pool.map(Slot.run, slots, share))
    row: dict[str, Any] = {"kind": kind}
    for key in ("kills", "kills_of_servers", "killed_later", "whole", "absent", "survivors",
                "leftovers"):  # fmt: skip
        row[key] = sum(getattr(found, key) for found in rows)
    wrong = [line for found in rows for line in found.wrong]
    for line in wrong:
        print(f"kills: {kind}: {line}", file=sys.stderr, flush=True)
    return {**row, "failures": len(wrong)}


@dataclass
class Counts:
    """A slot's columns, and its failures in words."""

    kills: int = 0
    kills_of_servers: int = 0
    killed_later: int = 0
    whole: int = 0
    absent: int = 0
    survivors: int = 0
    leftovers: int = 0
    wrong: list[str] = field(default_factory=list)


class Child:
    """A command in a session of its own, its processes marked, its output in a pipe."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.mark = SystemRandom().randrange(1, 800_000)
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._output, self.text = read, ""
        # Not in a file: the limit on files is not meant for the log.
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
        )
        os.close(write)
        # All of its processes inherit this limit, whatever they make of their titles.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.process.pid, resource.RLIMIT_MSGQUEUE, (self.mark, self.mark))

    def wait(self, seconds: float) -> bool:
        """True if it has ended within this time."""
        deadline = time.monotonic() + seconds
        while (running := self.process.poll() is None) and time.monotonic() < deadline:
            self.read()
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
        self.read()
        return not running

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, 1 << 16):
                self.text += data.decode(errors="replace")

    def signal(self, number: signal.Signals, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def alive(self) -> list[psutil.Process]:
        """Processes that have the mark."""
        self.process.poll()
        return list(_marked(self.mark))

    def close(self) -> None:
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        os.close(self._output)


def _marked(mark: int) -> Iterator[psutil.Process]:
    line = re.compile(rf"Max msgqueue size +{mark} +{mark} ")
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(OSError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and (
                line.search(Path(f"/proc/{process.pid}/limits").read_text())
            ):
                yield process


class Slot:
    """Kills one after the other, in one folder."""

    def __init__(
        self, kind: str, rng: Random, life: float, ways: tuple[str, ...], core: int,
        env: dict[str, str],
    ) -> None:  # fmt: skip
        self.kind, self.rng, self.life, self.ways, self.core = kind, rng, life, ways, core
        self.more, self.counts = env, Counts()

    def run(self, kills: int) -> Counts:
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            self.folder, self.temporary = Path(folder) / "shared", Path(folder) / "tmp"
            self.target, self.devices = self.folder / "a.relay", self.folder / "devices.json"
            for path in (self.folder, self.temporary, Path(folder) / "cache"):
                path.mkdir()
            if self.kind != "bench":
                shutil.copy(SHIPPED, self.devices)
            if self.kind == "serve":
                shutil.copy(_system_kv(), self.target)
            deck: list[str] = []
            for number in range(kills):
                if not deck:
                    deck = self.rng.sample(self.ways, len(self.ways))
                self._kill(deck.pop(), with_file=number % 2 == 0)
            self._restart()
        return self.counts

    def _environment(self, way: str = "") -> dict[str, str]:
        cache = str(self.folder.parent / "cache")
        env = environment(
            TMPDIR=str(self.temporary),
            VLLM_RELAY_DEVICES=str(self.devices),
            XDG_CACHE_HOME=cache,
            XDG_CONFIG_HOME=cache,
            VLLM_CPU_OMP_THREADS_BIND=str(self.core),
        )
        for name in (lifetime.COMMAND, *(("HOME",) if way == "no-home" else ())):
            env.pop(name, None)
        return env | self.more

    def _command(self, with_file: bool, port: int) -> list[str]:
        model = str(_model())
        if self.kind == "build":
            given = ("--system-prompt", str(_prompt()), "-o", str(self.target))
            return beside_python("vllm-relay", "build", "--model", model, *given, *OPTIONS)
        if self.kind == "calibrate":
            given = ("--shape", "4/2/32", "--max-model-len", "4096", "--max-num-seqs", "64")
            return beside_python("vllm-relay", "calibrate", *given)
        if self.kind == "bench":
            given = ("--system-prompt", str(_prompt()), "--requests", "2", "--tokens", "4")
            given += ("--repeats", "1", "--model", model)
            return beside_python("vllm-relay", "bench", *given, *OPTIONS)
        given = ("--attention-backend", "relay", "--port", str(port), "--host", "127.0.0.1")
        if with_file:
            given += ("--additional-config.relay.system_kv+", str(self.target))
        return beside_python("vllm", "serve", model, *given, *OPTIONS)

    def _kill(self, way: str, with_file: bool) -> None:
        rng, counts = self.rng, self.counts
        port = free_port()
        command = self._command(with_file, port)
        if way == "fsize":  # from no byte to more than any file has, in units of 512 bytes
            blocks = rng.choice([0, int(2 ** rng.uniform(0, 14))])
            command = ["sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh", *command]
        elif way == "read-only":
            where = self.temporary if self.kind == "bench" else self.folder
            path = shlex.quote(str(where))
            mount = f"mount --bind {path} {path} && mount -o remount,bind,ro {path}"
            users = [] if os.geteuid() == 0 else ["-r"]
            command = ["unshare", "-m", *users, "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
        number = SIGNALS.get(way) or rng.choice(list(SIGNALS.values()))
        moment = rng.uniform(0, 1.3 * self.life)
        about = f"{way}, {number.name} at {moment:.1f} of {self.life:.1f} s"
        counts.kills += 1
        counts.kills_of_servers += self.kind == "serve"
        # What an earlier command left is still there if this one does not come far enough, and
        # cannot be removed from a read-only folder. The undisturbed run removes it.
        kept = set(self.folder.iterdir())
        child = Child(command, self._environment(way))
        try:
            ended = child.wait(moment)
            if not ended:
                group = number == signal.SIGINT or (
                    number == signal.SIGKILL and self.kind == "serve"
                )
                child.signal(number, group)
            hard = number == signal.SIGKILL or way == "fsize"
            self._check(child, about, port, ended, hard, kept)
        finally:
            child.close()

    def _check(
        self, child: Child, about: str, port: int, ended: bool, hard: bool, kept: set[Path]
    ) -> None:
        counts, deadline = self.counts, time.monotonic() + GONE_S
        while (alive := child.alive()) and time.monotonic() < deadline:
            child.read()
            time.sleep(0.2)
        child.read()
        if alive and self.kind == "serve" and about != RESTART:
            counts.killed_later += 1
            child.signal(signal.SIGKILL, group=True)
            time.sleep(1)
            alive = child.alive()
        if alive:
            counts.survivors += len(alive)
            names = ", ".join(sorted(_name(process) for process in alive))
            counts.wrong.append(f"{about}: {names} live; log: {child.text[-500:]}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                users = ", ".join(_users(port))
                counts.wrong.append(f"{about}: port {port} is open: {users}; {child.text[-300:]}")
        if ended and self.kind != "serve" and child.process.returncode != 0:
            last = (child.text.strip().splitlines() or [""])[-1]
            if child.process.returncode != 1 or not last.startswith("vllm-relay: "):
                counts.wrong.append(f"{about}: ended with {child.text[-1500:]}")
        self._check_files(about, hard, kept)

    def _check_files(self, about: str, hard: bool, kept: set[Path]) -> None:
        counts = self.counts
        if self.target.exists():
            try:
                SystemKVFile(self.target).verify()
                counts.whole += 1
            except SystemKVError as error:
                counts.wrong.append(f"{about}: {error}")
        else:
            counts.absent += 1
        try:
            if self.devices.exists() and not load(self.devices):
                counts.wrong.append(f"{about}: devices.json is empty")
        except ValueError as error:
            counts.wrong.append(f"{about}: {error}")
        expected = {self.target, self.devices, *kept}
        left = [path for path in self.folder.iterdir() if path not in expected]
        left += self.temporary.glob("vllm-relay*")
        if hard:
            left = [
                path
                for path in left
                if not path.name.startswith((".vllm-relay-build-", "devices.json.", "vllm-relay-"))
            ]
        if left:
            counts.leftovers += len(left)
            counts.wrong.append(f"{about}: left {', '.join(path.name for path in left)}")
        shutil.rmtree(self.temporary)
        self.temporary.mkdir()

    def _restart(self) -> None:
        """An undisturbed run after the kills: it answers, and leaves its file alone."""
        port = free_port()
        child = Child(self._command(True, port), self._environment())
        try:
            if self.kind == "serve":
                try:
                    _ask(child, port)
                    child.signal(signal.SIGTERM, False)
                except (RuntimeError, OSError, KeyError) as error:
                    self.counts.wrong.append(f"{RESTART}: {error}; log: {child.text[-1500:]}")
            elif not child.wait(UNDISTURBED_S) or child.process.returncode != 0:
                self.counts.wrong.append(f"{RESTART}: {child.text[-1500:]}")
            for draft in self.folder.glob("devices.json.*"):
                draft.unlink()
            self._check(child, RESTART, port, False, False, set())
        finally:
            child.close()


def _users(port: int) -> Iterator[str]:
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.pid:
            yield _name(psutil.Process(connection.pid))


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:80]
    return "a process"


def _ask(child: Child, port: int) -> None:
    """Wait for a server and take one completion. Raises RuntimeError or OSError."""
    deadline, url = time.monotonic() + UNDISTURBED_S, f"http://127.0.0.1:{port}"
    while time.monotonic() < deadline:
        if child.wait(0.5):
            raise RuntimeError("it has ended")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            break
    body = {"model": str(_model()), "prompt": PROMPT + "Why?", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def _cores() -> list[int]:
    """The core of each slot."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[0], cores[-1]]


# Made once per process.


@cache
def _scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="kills-made-")
    _kept.append(folder)
    return Path(folder.name)


_kept: list[Any] = []


@cache
def _model() -> Path:
    """One layer with random weights and SmolLM2's tokenizer."""
    with (
        mock.patch.object(random_model, "LAYERS", 1),
        mock.patch.object(random_model, "VOCABULARY", 49152),
    ):
        model = random_model.write_random_model(_scratch() / "model", 4, 2, 32)
    for path in SMOLLM2.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, model / path.name)
    return model


@cache
def _prompt() -> Path:
    path = _scratch() / "prompt.txt"
    path.write_text(PROMPT)
    return path


@cache
def _system_kv() -> Path:
    """A file for servers, built once."""
    slot = Slot("build", Random(0), 0, (), _cores()[0], {})
    slot.folder, slot.temporary = _scratch() / "shared", _scratch() / "tmp"
    slot.target, slot.devices = slot.folder / "a.relay", slot.folder / "devices.json"
    slot.folder.mkdir(exist_ok=True)
    slot.temporary.mkdir(exist_ok=True)
    child = Child(slot._command(True, 0), slot._environment())
    try:
        assert child.wait(UNDISTURBED_S) and child.process.returncode == 0, child.text[-3000:]
    finally:
        child.close()
    return slot.target


@cache
def _life(kind: str) -> float:
    """Seconds of an undisturbed run, caches warm; a server's to its first answer, and a tenth."""
    slot = Slot(kind, Random(0), 0, (), _cores()[0], {})
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        slot.folder, slot.temporary = Path(folder) / "shared", Path(folder) / "tmp"
        slot.target, slot.devices = slot.folder / "a.relay", slot.folder / "devices.json"
        slot.folder.mkdir()
        slot.temporary.mkdir()
        if kind == "serve":
            shutil.copy(_system_kv(), slot.target)
        for _ in range(WARM_UPS + 1):
            started, port = time.monotonic(), free_port()
            child = Child(slot._command(True, port), slot._environment())
            try:
                if kind == "serve":
                    _ask(child, port)
                else:
                    assert child.wait(UNDISTURBED_S), child.text[-3000:]
                    assert child.process.returncode == 0, child.text[-3000:]
                seconds = time.monotonic() - started
            finally:
                child.close()
        return seconds * (1.1 if kind == "serve" else 1.0)
