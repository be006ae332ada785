"""Child processes of a measurement: servers and commands, their logs, their orderly end."""

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from vllm_relay.lifetime import unwind

Report = Callable[[str], None]
# No usage statistics of measurements; no colours in logs that programs read.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"}
# Seconds until a server must be ready: models can be large, and kernels compile.
READY = 1800.0
# Seconds to end after SIGINT and after SIGTERM. vLLM drains its engine for up to 10 s.
GRACE = (20.0, 10.0)
_given: set[int] = set()  # ports of servers that may not listen yet


def free_port() -> int:
    """TCP port without a listener; another one at each call."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def beside_python(program: str, *arguments: str) -> list[str]:
    """Command line of the `program` installed with this Python, whatever PATH says."""
    return [str(Path(sys.executable).parent / program), *arguments]


class ProcessDied(RuntimeError):
    """A child process ended on its own; the message holds the end of its log."""


@contextmanager
def kept_logs(prefix: str, hints: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Temporary folder for logs, kept if the body fails; the error names it and the reason.

    hints: text in a dead child's log -> reason to report.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except (RuntimeError, OSError) as error:
            stack.pop_all()
            reason = text = str(error)
            if isinstance(error, ProcessDied):
                # vLLM's last error only points at an earlier one
                errors = re.findall(r"\b\w*(?:Error|Exception): (?!Engine core init).+", text)
                reason = f"{text.partition(':')[0]}: {(errors or text.splitlines())[-1]}"
                told = (hint for sign, hint in (hints or {}).items() if sign in text)
                reason = next(told, reason)
            raise RuntimeError(f"{reason}; logs: {folder}") from error


class Process:
    """Child process in a process group of its own, its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str] | None) -> None:
        self.log = log
        with log.open("wb") as output:
            # Own session: Ctrl-C reaches only the parent, which then stops the child in order.
            self._child = subprocess.Popen(
                command,
                env={**os.environ, **QUIET, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Exit status; None while the child runs."""
        return self._child.poll()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def died(self) -> ProcessDied:
        tail = "\n".join(self.text().splitlines()[-25:])
        return ProcessDied(f"{self.log.stem} ended with status {self.poll()}:\n{tail}")

    def group_alive(self) -> bool:
        """True while the child or a process of its group runs."""
        self._child.poll()
        for process in psutil.process_iter(["status"]):
            # Zombies do no work, and some containers never reap them.
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
            with suppress(ProcessLookupError):  # may end between the check and the signal
                os.killpg(self._child.pid, number)

    def stop(self, first: signal.Signals = signal.SIGINT) -> None:
        """A signal to the child, which ends its workers; then SIGTERM, SIGKILL to its group."""
        unwind()
        try:
            self._child.send_signal(first)
            self._wait_group(GRACE[0])
            self._signal_group(signal.SIGTERM)
            self._wait_group(GRACE[1])
        finally:  # also when a second Ctrl-C interrupts the waiting
            self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to the group and waits for the child."""
        self._signal_group(signal.SIGKILL)
        self._child.wait()


def run(
    command: Sequence[str],
    log: Path,
    env: dict[str, str] | None = None,
    *,
    progress: Callable[[str], str] = lambda text: "running",
    report: Report = lambda doing: None,
) -> str:
    """Runs a command to its end; returns its output. ProcessDied if its exit status is not 0.

    progress: the output so far -> the text to report.
    """
    child = Process(command, log, env)
    try:
        while child.poll() is None:
            report(progress(child.text()))
            time.sleep(0.3)
        if child.poll() != 0:
            raise child.died()
    finally:
        child.stop()
    return child.text()


def last_message(log: str) -> str:
    """Newest message of vLLM's log, at most 60 characters; "importing vLLM" before the first."""
    messages = re.findall(r"\[\w+\.py:\d+\] (.{1,60})", log)
    return messages[-1].strip() if messages else "importing vLLM"


class Server(Process):
    """`vllm serve` on a free local port."""

    def __init__(
        self, model: Path | str, flags: Sequence[str], log: Path, env: dict[str, str] | None
    ) -> None:
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        self.model = model
        self.name = flag_value(flags, "served-model-name") or str(model)  # in requests
        where = ["--host", "127.0.0.1", "--port", port]
        super().__init__(beside_python("vllm", "serve", str(model), *where, *flags), log, env)

    def wait_ready(self, report: Report) -> None:
        """Returns once /health answers; ProcessDied or TimeoutError if it does not."""
        deadline = time.monotonic() + READY
        while time.monotonic() < deadline:
            if self.poll() is not None:
                raise self.died()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                report(last_message(self.text()))
                time.sleep(0.3)
        raise TimeoutError(f"{self.log.stem} was not ready after {READY:.0f} s, see {self.log}")


@contextmanager
def serving(
    model: Path | str,
    flags: Sequence[str],
    log: Path,
    *,
    env: dict[str, str] | None = None,
    report: Report = lambda doing: None,
) -> Iterator[Server]:
    """Server for the body, ready; stopped however the body ends."""
    server = Server(model, flags, log, env)
    try:
        server.wait_ready(report)
        yield server
    except Exception as error:
        if server.poll() is not None and not isinstance(error, ProcessDied):
            raise server.died() from error  # the client's error is only the symptom
        raise
    finally:
        server.stop()


def flag_name(flag: str) -> str:
    """Option name in a command-line element: ``--max_model_len=1`` is ``max-model-len``; or ""."""
    return flag.partition("=")[0][2:].replace("_", "-") if flag.startswith("--") else ""


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """Value of an option, given as one element or two; the last occurrence counts."""
    found = None
    for i, flag in enumerate(flags):
        if flag_name(flag) == name:
            _, equals, value = flag.partition("=")
            found = value if equals else next(iter(flags[i + 1 : i + 2]), None)
    return found
