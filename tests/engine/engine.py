"""Start engines for tests: real ones, in processes of their own, with nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
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


def run_engine(
    folder: Path, spec: dict[str, Any], script: str = "run_engine.py", **env: str
) -> dict[str, Any]:
    """Run a script of this folder; returns its result and ``log``, shown when it fails.

    The engine runs in the script's own process unless told otherwise: one start of Python and vLLM
    less. Servers, and the tests that say so, have it in processes of its own as users do.
    """
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env}
    spec_path, result_path = folder / "spec.json", folder / "result.json"
    spec_path.write_text(json.dumps(spec))
    result_path.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), spec_path, result_path],
        env=environment(**env),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"engine failed:\n{done.stdout[-6000:]}"
    return {**json.loads(result_path.read_text()), "log": done.stdout}
