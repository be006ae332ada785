"""Start engines for tests: real ones, in processes of their own, with nothing left behind."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Environment of an engine in processes of its own, as users run it.
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
SMOLLM2 = ROOT / ".models" / "SmolLM2-135M-Instruct"


def environment(**extra: str) -> dict[str, str]:
    """Environment of an engine process: offline, this repository importable in its workers."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **extra,
    }


@cache
def _host() -> subprocess.Popen[str]:
    """The process of `host.py`, one per test process."""
    host = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.host"],
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(host.kill)
    return host


def run_forked(script: Path, argv: list[str], cwd: Path) -> tuple[int, str]:
    """Exit status and log of a script whose engine runs in its own process, a child of the host."""
    log = cwd / "run.log"
    given = {
        "script": str(script),
        "argv": argv,
        "cwd": str(cwd),
        "env": environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        "log": str(log),
    }
    host = _host()
    assert host.stdin is not None and host.stdout is not None
    host.stdin.write(json.dumps(given) + "\n")
    host.stdin.flush()
    status = host.stdout.readline()
    assert status, "the process that forks engines has died"
    return int(status), log.read_text(errors="replace")


def run_apart(script: Path, argv: list[str], cwd: Path, **env: str) -> tuple[int, str]:
    """Exit status and log of a script in a process started afresh, with more environment."""
    done = subprocess.run(
        [sys.executable, str(script), *argv],
        env=environment(**{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env}),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    return done.returncode, done.stdout


def run_engine(
    folder: Path, spec: dict[str, Any], script: str = "run_engine.py", **env: str
) -> dict[str, Any]:
    """Run a script of this folder; returns its result and ``log``, shown when it fails.

    The engine runs in the script's own process, which is forked from one that has imported vLLM.
    With `env` the process is started afresh: variables are read at import, or say that the engine
    has processes of its own, as users' servers do.
    """
    path, argv = Path(__file__).with_name(script), [str(folder / "spec.json")]
    argv.append(str(folder / "result.json"))
    Path(argv[0]).write_text(json.dumps(spec))
    Path(argv[1]).unlink(missing_ok=True)
    status, log = run_apart(path, argv, folder, **env) if env else run_forked(path, argv, folder)
    assert status == 0, f"engine failed:\n{log[-6000:]}"
    return {**json.loads(Path(argv[1]).read_text()), "log": log}
