"""The examples run as their readers run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_hydragen_loop(tmp_path):
    """Where neither vLLM nor Triton can be imported."""
    script = ROOT / "examples" / "hydragen_loop.py"
    code = (
        "import runpy, sys; sys.modules.update(vllm=None, triton=None); "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    equal, total = re.search(r"(\d+) of (\d+) tokens equal", done.stdout).groups()
    assert equal == total
    assert int(total) > 0
