"""On an engine outside the supported range vLLM serves as if relay were not installed."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.environment import OFFLINE
from benchmarks.harness.random_model import write_random_model
from tests.engine.engine import ROOT, environment, run_engine
from vllm_relay.serving.processes import beside_python

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Runs at the start of every process, before vLLM reads its version there.
SITE = """
import sys, types
module = types.ModuleType("vllm._version")
module.__version__ = module.version = "{version}"
module.__version_tuple__ = module.version_tuple = tuple(map(int, "{version}".split(".")))
sys.modules["vllm._version"] = module
"""
PREFIX = list(range(3, 403))


def _versioned(folder: Path, version: str) -> dict[str, str]:
    """Environment in which vLLM has this version."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(SITE.format(version=version))
    return {"PYTHONPATH": f"{folder / 'site'}:{ROOT}", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "model", 4, 2, 64)


def _spec(model: Path) -> dict[str, Any]:
    return {
        "engine": {
            "model": str(model),
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "num_gpu_blocks_override": 64,
            "dtype": "float32",
        },
        "warm_up": [PREFIX],
        "prompts": [[*PREFIX, 700 + i, 5] for i in range(4)],
        "force": None,
        "passes": [(None, 12)],
    }


@pytest.fixture(scope="module")
def known(model: Path) -> dict[str, Any]:
    """Stock vLLM on a supported version."""
    found = run_engine(model.parent, _spec(model))
    assert "relay" not in found["log"]
    return found


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0"])
def test_stock_answers_alike_with_one_line_and_relay_is_one_error(
    version: str, model: Path, known: dict[str, Any], tmp_path: Path
) -> None:
    env = _versioned(tmp_path, version)
    result = run_engine(tmp_path, _spec(model), **env)
    # logprobs of an engine in a process of its own, with bound threads, may differ in the last bits
    assert result["passes"][0]["tokens"] == known["passes"][0]["tokens"]
    lines = [line for line in result["log"].splitlines() if "relay: " in line]
    assert (
        len(lines) == 1
        and f"unavailable: it supports vLLM >= 0.26, < 0.34; found {version}" in (lines[0])
    )
    done = subprocess.run(
        beside_python("vllm", "serve", str(model), "--attention-backend", "relay"),
        env=environment(**OFFLINE, **env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert text.count("relay: unavailable: it supports") == 1
    assert text.count("'RELAY'") == 1 and "Valid options are" in text
