"""The engines that part ``parity`` compares."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine_runner import ENVIRONMENT, EngineFailed
from benchmarks.gpu.systems import PROBE_STEPS
from benchmarks.harness.environment import importable

# Steps of the case before that the counters may hear of late.
LAG = 3


@dataclass(frozen=True)
class Run:
    """One engine.

    Attributes:
        system: "stock", "relay" or "planted": relay with an error. relay: settings
            beside ``min_saved_tokens`` 0. model: of `ARCHITECTURES`; "": a Llama with heads of 128.
        kv_cache: vLLM's ``kv_cache_dtype``. system_kv: the groups' prefixes are loaded from files.
        drafts: the model itself drafts three tokens a step; no tokens are forced.
    """

    system: str
    runner: str = "v2"
    graphs: bool = True
    dtype: str = "bfloat16"
    relay: tuple[tuple[str, Any], ...] = ()
    model: str = ""
    kv_cache: str = "auto"
    system_kv: bool = False
    drafts: bool = False

    @property
    def name(self) -> str:
        more = ", ".join(f"{name} {value}" for name, value in self.relay)
        graphs = "graphs" if self.graphs else "eager"
        kv_cache = self.kv_cache if self.kv_cache != "auto" else ""
        files, drafts = "system KV" if self.system_kv else "", "drafts" if self.drafts else ""
        words = [self.model, self.runner, graphs, self.dtype, kv_cache, drafts]
        words += [self.system, more, files]
        return " ".join(filter(None, words))

    @property
    def measure(self) -> "Run":
        """The engine that it is held against: stock, of the same precision."""
        return Run(
            "stock",
            runner="v1" if self.drafts else "v2",
            dtype=self.dtype,
            model=self.model,
            kv_cache=self.kv_cache,
            drafts=self.drafts,
        )

    def idle_steps(self, steps: int) -> int:
        """Steps that may count as relayed where none was: heard of late, or planned as a probe."""
        return LAG + (0 if self.runner == "v1" and self.graphs else steps // PROBE_STEPS + 1)


# Each `Run.measure` before the runs that are held against it.
RUNS = (
    Run("stock"),
    Run("relay"),
    Run("stock", dtype="float16"),
    Run("relay", dtype="float16"),
    Run("planted", dtype="float16"),
    Run("relay", runner="v1"),
    Run("relay", graphs=False),
    Run("relay", runner="v1", graphs=False),
    Run("relay", relay=(("dense", True), ("max_levels", 2))),
    Run("planted", runner="v1", dtype="float16"),
    Run("planted", graphs=False, dtype="float16"),
    Run("relay", system_kv=True),
    Run("stock", kv_cache="fp8"),
    Run("relay", kv_cache="fp8"),
    Run("stock", runner="v1", drafts=True),
    Run("relay", runner="v1", drafts=True),
    # Sinks and windows; a soft cap and windows.
    Run("stock", model="gpt-oss"),
    Run("relay", model="gpt-oss"),
    Run("stock", model="gemma-2"),
    Run("relay", model="gemma-2"),
)


def give_system_kvs(spec: dict[str, Any], folder: Path, seconds: float) -> None:
    """Build a file of each prefix with ``vllm-relay build``, and have the engine load them all.

    Nothing else warms the cache. vLLM has to find the plugin: the package is installed.

    Args:
        spec: of the engine; changed. folder: for the files. seconds: that it may take.

    Raises:
        EngineFailed: the command failed, or took longer.
    """
    engine = spec["engine"]
    prefixes = [prefix for case in spec["cases"] for prefix in case["warm_up"]]
    names = [folder / f"prefix-{i}.json" for i in range(len(prefixes))]
    for name, prefix in zip(names, prefixes, strict=True):
        name.write_text(json.dumps(prefix))
    files = folder / "system-kv"
    files.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "vllm_relay.cli", "build", "--model", engine["model"]]
    command += [x for name in names for x in ("--token-ids", str(name))]
    command += ["--output", str(files), "--skip-tokenizer-init"]
    for option in ("dtype", "max_model_len", "gpu_memory_utilization"):
        if option in engine:
            command += [f"--{option.replace('_', '-')}", str(engine[option])]
    environment = {**os.environ, **ENVIRONMENT, **importable()}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"vllm-relay build: its time was up after {seconds:.0f} s") from error
    if done.returncode:
        print(done.stderr[-4000:], flush=True)
        raise EngineFailed(f"vllm-relay build: {done.stderr.strip().splitlines()[-1:]}")
    paths = [str(files / f"{name.stem}.relay") for name in names]
    engine["additional_config"]["relay"]["system_kv"] = paths
    spec["cases"] = [{**case, "warm_up": []} for case in spec["cases"]]
