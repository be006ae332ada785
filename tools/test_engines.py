"""Run what must hold on every engine, one release after another; a row each in a CSV.

    python tools/test_engines.py [VERSION ...]

CPU releases run in an environment each, which is removed after a run of all. The Python files of a
CUDA release without a CPU release of its own are tested on CPU tensors. What this revision has in
benchmarks/results/engines.csv is skipped: a run that was ended goes on.
"""

import re
import shutil
import subprocess
import sys
from functools import partial

import setup_env
from engine_sources import WHEELS

sys.path.insert(0, str(setup_env.ROOT))
from benchmarks.harness.environment import RESULTS
from benchmarks.harness.result_csv import Row, revision, run_chunks, source

SIDE_BY_SIDE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
CPU_TESTS = (
    *SIDE_BY_SIDE,
    *("tests/unit/test_plugin.py", "tests/unit/backend", "tests/unit/calibration"),
    *("tests/engine/test_parity.py", "tests/engine/test_models.py"),
    *("tests/engine/test_system_kv.py", "tests/engine/test_system_kv_hybrid.py"),
    *("tests/unit/system_kv/test_retention.py", "tests/engine/test_system_kv_learn.py"),
    *("tests/unit/system_kv/test_pins.py", "tests/engine/test_pins.py"),
)
CODE = ("vllm_relay", "tests", "requirements", "tools")
WORDS = ("passed", "failed", "skipped", "errors")


def test(releases: list[str], index: int, keep: bool) -> Row:
    """Counts of one release's tests. keep: leave its environment for another run."""
    version, python = releases[index], sys.executable
    found: Row = {"engine": version}
    if version not in setup_env.engines():
        return found | _counts(python, "tests/triton/cuda", "--vllm", version)
    venv = setup_env.ROOT / f".venv-{version}"
    if version != setup_env.DEFAULT_ENGINE:
        setup = (sys.executable, "tools/setup_env.py", "--engine", version, "--venv", str(venv))
        subprocess.run(setup, cwd=setup_env.ROOT, check=True)
        python = str(venv / "bin/python")
    try:
        return found | _counts(python, *CPU_TESTS)
    finally:
        if venv.exists() and not keep:
            shutil.rmtree(venv)


def _counts(python: str, *arguments: str) -> Row:
    command = (python, "-m", "pytest", *arguments)
    print(" ".join(command), flush=True)
    done = subprocess.run(command, cwd=setup_env.ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    # The engine's log may follow the summary.
    summaries = re.findall(r"^=+ (.*) in [0-9.]+s", done.stdout, re.M)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", "".join(summaries[-1:]))}
    if done.returncode not in (0, 1) or "passed" not in counts:
        raise RuntimeError(f"pytest ended with status {done.returncode}")
    counts["errors"] = counts.get("errors", 0) + counts.get("error", 0)
    return {word: counts.get(word, 0) for word in WORDS}


def main() -> int:
    known = sorted({*setup_env.engines(), *WHEELS})
    names = sys.argv[1:] or known
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"test_engines: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    columns = source() | {"revision": revision(*CODE)}
    failed = 0
    for index in map(known.index, names):
        run = partial(test, known, keep=bool(sys.argv[1:]))
        (row,) = run_chunks(RESULTS / "engines.csv", run, range(index, index + 1), columns)
        failed += row["failed"] + row["errors"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
