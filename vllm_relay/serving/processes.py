"""Real servers and clients as child processes: started, watched, stopped in order."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

# A measurement is nothing to report, and logs are read by programs.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"}

# First match wins, read from the end of a server's log: the youngest line says where it is.
PHASES = (
    (re.compile(r"init engine|Supported tasks|Starting vLLM server"), "starting the HTTP API"),
    (re.compile(r"KV cache size"), "warming up"),
    (re.compile(r"Dynamo bytecode|Compiling a graph|torch\.compile took"), "compiling the model"),
    (re.compile(r"Loading weights took"), "allocating the KV cache"),
    (re.compile(r"Starting to load model"), "loading the weights"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the worker process"),
    (re.compile(r"Resolved architecture"), "starting the engine process"),
)


# Ports that servers of this process were told, and may not listen on yet.
_told: set[int] = set()


def free_port() -> int:
    """A TCP port that nobody listens on now, another one each time."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _told:
            _told.add(port)
            return port


def beside_python(program: str, *arguments: str) -> list[str]:
    """Command line of the `program` beside this Python, whatever PATH says."""
    return [str(Path(sys.executable).parent / program), *arguments]


def vllm(*arguments: str) -> list[str]:
    """Command line of `vllm`."""
    return beside_python("vllm", *arguments)


# Seconds to end after SIGINT and after SIGTERM. vLLM drains its engine for up to 10 s.
GRACE = (20.0, 10.0)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """A SIGTERM ends the body as an exception does: what it has started is stopped.

    By itself Python would end at once, and leave servers and engines behind.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ProcessDied(RuntimeError):
    """A child process ended on its own; the message holds the end of its log."""


@contextmanager
def kept_logs(prefix: str, hints: Mapping[str, str] | None = None) -> Iterator[Path]:
    """A folder for logs, which stays if something fails; the error names it, and the reason.

    Args:
        prefix: of its name. hints: by what is in the log of a child that died, what to say of it.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except ProcessDied as error:
        text = str(error)
        # vLLM's last words only point at an earlier error
        told = re.findall(r"\b\w*(?:Error|Exception): (?!Engine core init).+", text)
        reason = f"{text.partition(':')[0]}: {(told or text.splitlines())[-1]}"
        reason = next((said for sign, said in (hints or {}).items() if sign in text), reason)
        raise RuntimeError(f"{reason}; logs: {folder}") from error
    except (RuntimeError, OSError) as error:
        raise RuntimeError(f"{error}; logs: {folder}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


class Process:
    """A child in its own process group, its output in a file."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            # Own session: Ctrl-C reaches only the parent, which then stops the child in order.
            self._child = subprocess.Popen(
                command,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._child.poll()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def died(self) -> ProcessDied:
        tail = "\n".join(self.text().splitlines()[-25:])
        return ProcessDied(f"{self.log.stem} ended with status {self.poll()}:\n{tail}")

    def group_alive(self) -> bool:
        """Whether the child or anything it started in its group still runs."""
        self._child.poll()
        for process in psutil.process_iter(["status"]):
            # A zombie is no work left, and in a container nobody may ever reap it.
            if process.info["status"] != psutil.STATUS_ZOMBIE:
                with suppress(ProcessLookupError):
                    if os.getpgid(process.pid) == self._child.pid:
                        return True
        return False

    def _wait_group(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.group_alive() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _signal_group(self, number: signal.Signals) -> None:
        if self.group_alive():
            with suppress(ProcessLookupError):  # it may end between the look and the signal
                os.killpg(self._child.pid, number)

    def stop(self) -> None:
        """SIGINT to the child (it ends its own workers), then SIGTERM and SIGKILL to its group."""
        try:
            self._child.send_signal(signal.SIGINT)
            self._wait_group(GRACE[0])
            self._signal_group(signal.SIGTERM)
            self._wait_group(GRACE[1])
        finally:  # also when a second Ctrl-C cuts the waiting short
            self._signal_group(signal.SIGKILL)
            self._child.wait()


def phase(log: str) -> str:
    """What a server that logged `log` is doing while it starts."""
    for line in reversed(log.splitlines()):
        for pattern, name in PHASES:
            if pattern.search(line):
                return name
    return "importing vLLM"


def flag_name(flag: str) -> str:
    """Of one element of a command line: ``--max_model_len=1`` is ``max-model-len``; else empty."""
    return flag.partition("=")[0][2:].replace("_", "-") if flag.startswith("--") else ""


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """What a command line gives an option, as one element or two; the last counts."""
    found = None
    for i, flag in enumerate(flags):
        if flag_name(flag) == name:
            _, equals, value = flag.partition("=")
            found = value if equals else next(iter(flags[i + 1 : i + 2]), None)
    return found


class Server(Process):
    """`vllm serve` on a free local port; ``name``: of the model, as clients ask for it."""

    def __init__(self, model: Path | str, flags: list[str], log: Path, env: dict[str, str]) -> None:
        self.port = free_port()
        self.model = model
        self.name = flag_value(flags, "served-model-name") or str(model)
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        super().__init__([*vllm("serve"), str(model), *where, *flags], log, env)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, seconds: float, report: Callable[[str], None]) -> None:
        """Return once /health answers; ProcessDied or TimeoutError otherwise."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.poll() is not None:
                raise self.died()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                report(phase(self.text()))
                time.sleep(0.3)
        raise TimeoutError(f"{self.log.stem} was not ready after {seconds:.0f} s, see {self.log}")


@contextmanager
def started(
    model: Path | str, flags: list[str], log: Path, *, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """A server for the body, not ready yet; stopped however the body ends."""
    server = Server(model, flags, log, {**QUIET, **(env or {})})
    try:
        yield server
    except Exception as error:
        if server.poll() is not None and not isinstance(error, ProcessDied):
            raise server.died() from error  # the client's error is only the symptom
        raise
    finally:
        server.stop()


@contextmanager
def serving(
    model: Path | str,
    flags: list[str],
    log: Path,
    *,
    env: dict[str, str] | None = None,
    seconds: float = 300,
    report: Callable[[str], None] = lambda doing: None,
) -> Iterator[Server]:
    """A ready server for the body; stopped however the body ends."""
    with started(model, flags, log, env=env) as server:
        server.wait_ready(seconds, report)
        yield server


def bench_serve(
    server: Server,
    options: dict[str, Any],
    report: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """Run `vllm bench serve --<name> <value> ...` against `server`; returns its result JSON.

    Options that are True are given without a value; the tokenizer is the model's unless they name
    one. The result and the log of the client lie beside the log of the server. A client that fails
    raises ProcessDied, failed requests raise RuntimeError.
    """
    result = server.log.with_name(f"{server.log.stem}-bench.json")
    fixed = {
        "base-url": server.url,
        "model": server.name,
        "tokenizer": server.model,
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    result.unlink(missing_ok=True)  # of the run before
    command = [*vllm("bench", "serve"), "--ignore-eos", "--save-result"]
    for name, value in {**fixed, **options}.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    client = Process(command, result.with_suffix(".log"), QUIET)
    try:
        while client.poll() is None:
            counts = re.findall(r"(\d+)/(\d+) \[", client.text().partition("Starting main")[2])
            report("{} of {} requests".format(*counts[-1]) if counts else "preparing")
            time.sleep(0.5)
        if client.poll() != 0 or not result.is_file():
            raise client.died()
    finally:
        client.stop()
    measured: dict[str, Any] = json.loads(result.read_text())
    if measured["failed"]:
        told = next((x for x in measured.get("errors", []) if x), "").strip().splitlines()
        why = told[-1] if told else f"see {client.log}"
        raise RuntimeError(f"{measured['failed']} bench requests failed: {why}")
    return measured


def build(
    model: Path | str,
    output: Path,
    options: list[str],
    log: Path,
    *,
    env: dict[str, str] | None = None,
    report: Callable[[str], None] = lambda doing: None,
) -> None:
    """Run `vllm-relay build`; ``output``: a file or a folder. Failing, it raises ProcessDied."""
    command = beside_python("vllm-relay", "build", "--model", str(model), "-o", str(output))
    child = Process([*command, *options], log, QUIET | (env or {}))
    try:
        while child.poll() is None:
            said = re.findall(r"^vllm-relay: (.+)$", child.text(), re.MULTILINE)
            report(said[-1] if said else "importing vLLM")
            time.sleep(0.3)
        if child.poll() != 0 or not output.exists():
            raise child.died()
    finally:
        child.stop()


def build_system_kv(
    model: Path | str,
    prompt: Path,
    flags: list[str],
    *,
    env: dict[str, str] | None = None,
    report: Callable[[str], None] = lambda doing: None,
) -> Path:
    """Build the system KV of the system message in the file `prompt`; returns the file made.

    It and the log lie beside `prompt`.
    """
    made = prompt.with_suffix(".relay")
    log = prompt.with_name("system-kv-build.log")
    build(model, made, ["--system-prompt", str(prompt), *flags], log, env=env, report=report)
    return made
