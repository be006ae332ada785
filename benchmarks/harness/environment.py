"""Paths and environment of the engines that benchmarks start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MODEL_NAME = "SmolLM2-135M-Instruct"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"}
# Models are on disk: child processes need no hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Weights and KV caches in huge pages if the system offers them on request. In small pages equal
# engines differ for their whole life by the place of their memory, and no round shows it.
HUGE_PAGES = {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")}


def model_path(root: Path = ROOT) -> Path:
    """Folder of the demo model.

    Raises:
        FileNotFoundError: there is none; the message names the command that makes it.
    """
    path = root / ".models" / MODEL_NAME
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no model in .models/{MODEL_NAME}: run `make model`")
    return path


def multiplies_bf16() -> bool:
    """True if oneDNN multiplies bf16 matrices on this CPU; PyTorch's own product is far slower."""
    import torch  # takes seconds: --help should not wait for it

    has_mkldnn = torch.backends.mkldnn.is_available()
    return has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def model_dtype() -> str:
    """vLLM's ``--dtype`` of compared engines: float32 on a CPU that lacks bf16, else "auto"."""
    import torch

    return "auto" if torch.version.cuda or multiplies_bf16() else "float32"


def kv_gib() -> int:
    """GiB of KV cache per CPU engine: ``VLLM_CPU_KVCACHE_SPACE``, else 2."""
    return int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"))


def importable() -> dict[str, str]:
    """Environment in which workers import this repository's modules by name."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


@contextmanager
def engine_environment() -> Iterator[None]:
    """Sets the environment of engines and their children; restores it after the body."""
    before = dict(os.environ)
    os.environ.update(OFFLINE | HUGE_PAGES | importable())
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gib())
    # Prompts are random: positions that a model was not trained for do no harm.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
