"""Systems that are compared: vLLM in two ways, relay in two ways, and their ceiling.

The RelayAttention paper (arXiv 2402.14808) compares vLLM, vLLM with prefix sharing (vLLM-PS) and
vLLM with relay attention (vLLM-RA). The fourth system here loads the prefix's KV from a file. The
one that skips attention is the ceiling of Hydragen (arXiv 2402.05099).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class System:
    """One way to serve a model.

    Attributes:
        key: name in CSVs. label: name in tables and figures. relay: relay's attention backend.
        caching: prefix caching. system_kv: load the prefix's KV from a file at start.
        attention: False: attention is skipped, all else is done. settings: relay's settings.
    """

    key: str
    label: str
    relay: bool = False
    caching: bool = True
    system_kv: bool = False
    attention: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

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
# The baseline.
REFERENCE = "stock"
# Share of a GPU's memory for all engines that are up at once.
GPU_MEMORY = 0.9


def memory_share(engines: int) -> float | None:
    """Share of a GPU's memory per engine that is up at once; None without a GPU."""
    import torch

    return round(GPU_MEMORY / engines, 3) if torch.cuda.is_available() else None
