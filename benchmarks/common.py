"""What every benchmark needs: provenance, CSV files, the model folder, a real server."""

import csv
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
MODEL_NAME = "SmolLM2-135M-Instruct"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"}

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


def model_path(root: Path = ROOT) -> Path:
    """The folder of the demo model; FileNotFoundError says how to make it."""
    path = root / ".models" / MODEL_NAME
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no model in .models/{MODEL_NAME}: run `make model`")
    return path


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    """Name of the GPU if torch sees one, else of the CPU."""
    if "+cpu" not in _version("torch"):
        import torch  # seconds to import: not for a build that knows no GPU

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    names = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return names[1].strip() if names else platform.processor() or platform.machine()


def _revision() -> str:
    """Short git revision, `-dirty` if tracked files differ from it, "none" outside a commit."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # a machine without git still runs the benchmarks
        return "none"
    return done.stdout.strip() if done.returncode == 0 else "none"


def provenance() -> dict[str, str]:
    """Where a number comes from: date, device, cores, versions, revision, command."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": _device(),
        "cores": str(len(os.sched_getaffinity(0))),
        "vllm": _version("vllm"),
        "torch": _version("torch"),
        "vllm_relay": _version("vllm-relay"),
        "python": platform.python_version(),
        "revision": _revision(),
        "command": shlex.join(["python", str(shown), *sys.argv[1:]]),
    }


def write_csv(path: Path, rows: list[dict[str, Any]], prov: dict[str, str]) -> Path:
    """Write `rows`, each with the columns of `prov`, to a new file beside `path`.

    `results/demo.csv` becomes `results/demo-20260131-120000.csv`: an old measurement is never
    overwritten. Returns the path written. Raises ValueError if there are no rows.
    """
    if not rows:
        raise ValueError("rows is empty: nothing was measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in (*row, *prov)))
    stem = f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    tried = 1
    while True:
        name = f"{stem}{'' if tried == 1 else f'-{tried}'}{path.suffix}"
        try:
            with (path.parent / name).open("x", newline="") as file:
                writer = csv.DictWriter(file, columns, restval="")
                writer.writeheader()
                writer.writerows({**row, **prov} for row in rows)
        except FileExistsError:
            tried += 1
            continue
        return path.parent / name


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def beside_python(program: str, *arguments: str) -> list[str]:
    """Command line of the `program` beside this Python, whatever PATH says."""
    return [str(Path(sys.executable).parent / program), *arguments]


def vllm(*arguments: str) -> list[str]:
    """Command line of `vllm`."""
    return beside_python("vllm", *arguments)


# Seconds to end after SIGINT and after SIGTERM. vLLM drains its engine for up to 10 s.
GRACE = (20.0, 10.0)


class ProcessDied(RuntimeError):
    """A child process ended on its own; the message holds the end of its log."""


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


class Server(Process):
    """`vllm serve` on a free local port."""

    def __init__(self, model: Path, flags: list[str], log: Path, env: dict[str, str]) -> None:
        self.port = free_port()
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
def serving(
    model: Path,
    flags: list[str],
    log: Path,
    *,
    env: dict[str, str] | None = None,
    seconds: float = 300,
    report: Callable[[str], None] = lambda doing: None,
) -> Iterator[Server]:
    """A ready server for the body; stopped however the body ends."""
    server = Server(model, flags, log, {**OFFLINE, **(env or {})})
    try:
        server.wait_ready(seconds, report)
        try:
            yield server
        except Exception as error:
            if server.poll() is not None:  # the client's error is only the symptom
                raise server.died() from error
            raise
    finally:
        server.stop()


def bench_serve(
    server: Server, model: Path, options: dict[str, Any], report: Callable[[str], None]
) -> dict[str, Any]:
    """Run `vllm bench serve --<name> <value> ...` against `server`; returns its result JSON.

    The result and the log of the client lie beside the log of the server. A client that fails
    raises ProcessDied, failed requests raise RuntimeError.
    """
    result = server.log.with_name(f"{server.log.stem}-bench.json")
    fixed = {
        "base-url": server.url,
        "model": model.name,
        "tokenizer": model,
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    command = [*vllm("bench", "serve"), "--ignore-eos", "--save-result"]
    for name, value in {**fixed, **options}.items():
        command += [f"--{name}", str(value)]
    client = Process(command, result.with_suffix(".log"), OFFLINE)
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
        raise RuntimeError(f"{measured['failed']} bench requests failed, see {client.log}")
    return measured


def build_system_kv(
    model: Path,
    prompt: Path,
    flags: list[str],
    *,
    env: dict[str, str],
    report: Callable[[str], None],
) -> Path:
    """Run `vllm-relay build` on the system message in the file `prompt`; returns the file made.

    It and the log lie beside `prompt`. A build that fails raises ProcessDied.
    """
    made = prompt.with_suffix(".relay")
    options = ["--model", str(model), "--system-prompt", str(prompt), "-o", str(made)]
    log = prompt.with_name("system-kv-build.log")
    build = Process([*beside_python("vllm-relay", "build"), *options, *flags], log, OFFLINE | env)
    try:
        while build.poll() is None:
            said = re.findall(r"^vllm-relay: (.+)$", build.text(), re.MULTILINE)
            report(said[-1] if said else "importing vLLM")
            time.sleep(0.3)
        if build.poll() != 0 or not made.is_file():
            raise build.died()
    finally:
        build.stop()
    return made


@contextmanager
def step(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """A spinner with elapsed seconds; the body reports what it is doing. Ends with one line that
    stays. Without a terminal: plain lines, at most one every 5 s."""
    started = printed = time.monotonic()
    live = console.is_terminal
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not live) as progress:
        task = progress.add_task(title)

        def report(doing: str) -> None:
            nonlocal printed
            progress.update(task, description=f"{title}: {doing}")
            if not live and time.monotonic() - printed >= 5:
                printed = time.monotonic()
                console.print(f"  {title}: {doing}", highlight=False)

        yield report
    seconds = time.monotonic() - started
    console.print(f"  [green]done[/] {title} [dim]({seconds:.0f} s)[/]", highlight=False)
