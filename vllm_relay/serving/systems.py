"""Systems that are compared: vLLM in two ways, relay in two ways, and their ceiling.

The RelayAttention paper (arXiv 2402.14808) compares vLLM, vLLM with prefix sharing (vLLM-PS) and
vLLM with relay attention (vLLM-RA). The fourth system here loads the prefix's KV from a file. The
one that skips attention is the ceiling of Hydragen (arXiv 2402.05099).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class System:
    """One way to serve a model."""

    key: str  # name in CSVs
    label: str  # name in tables and figures
    relay: bool = False  # relay's attention backend
    caching: bool = True  # prefix caching
    system_kv: bool = False  # load the prefix's KV from a file at start
    attention: bool = True  # False: attention is skipped, all else is done
    settings: dict[str, Any] = field(default_factory=dict)  # relay's

    def flags(self, files: Sequence[Path] = ()) -> list[str]:
        """Options of ``vllm serve``; files: system KV to load, if the system does."""
        flags = ["--enable-prefix-caching" if self.caching else "--no-enable-prefix-caching"]
        if self.relay:
            flags += ["--attention-backend", "relay"]
        for file in files if self.system_kv else ():
            flags += ["--additional-config.relay.system_kv+", str(file)]
        return flags


SYSTEMS = {
    system.key: system
    for system in (
        System("stock-no-caching", "vLLM, no prefix caching", caching=False),
        System("stock", "vLLM"),
        System("relay", "relay", relay=True),
        System("relay-system-kv", "relay, KV from a file", relay=True, system_kv=True),
        System("no-attention", "no attention at all", attention=False),
        System("relay-1-level", "relay, one level", relay=True, settings={"max_levels": 1}),
        System("relay-2-levels", "relay, two levels", relay=True, settings={"max_levels": 2}),
    )
}
FOUR = ("stock-no-caching", "stock", "relay", "relay-system-kv")
REFERENCE = "stock"  # the baseline


def memory_share(engines: int) -> float:
    """``--gpu-memory-utilization`` per engine, for all of them at once on a GPU or on a CPU.

    The CPU engine takes it of the machine's memory, of which others use a part.
    """
    import torch

    if torch.cuda.is_available():
        return round(0.9 / engines, 3)
    memory = psutil.virtual_memory()
    return round(0.8 * memory.available / memory.total / engines, 3)
