"""What is compared: vLLM in two ways, relay in two ways, and their ceiling.

The RelayAttention paper (arXiv 2402.14808) compares vLLM, vLLM with prefix sharing (vLLM-PS) and
vLLM with relay attention (vLLM-RA). The fourth system here loads the prefix's KV from a file; the
one that skips attention is the ceiling that Hydragen (arXiv 2402.05099) draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class System:
    """One of them.

    Attributes:
        key: as rows of a CSV name it. label: as tables and figures do. relay: not vLLM's backend.
        caching: prefix caching. system_kv: the prefix's KV is loaded from a file at start.
        attention: False: skipped, everything else is done. settings: relay's own.
    """

    key: str
    label: str
    relay: bool = False
    caching: bool = True
    system_kv: bool = False
    attention: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    def flags(self, files: Sequence[Path] = ()) -> list[str]:
        """Options of ``vllm serve``; files: system KVs to load, if this one does."""
        flags = ["--enable-prefix-caching" if self.caching else "--no-enable-prefix-caching"]
        if self.relay:
            flags += ["--attention-backend", "relay"]
        if self.system_kv:
            for file in files:
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
# Of a GPU's memory, for all that are up at once.
GPU_MEMORY = 0.9
# What the others are compared with.
REFERENCE = "stock"
# Root mean square of log-probability differences (nats) between greedy answers, see
# `serving.Distance`: of all answers together, and of the one that is farthest off. Rounding in bf16
# makes 0.01 to 0.05, KV that is not the prompt's more than 1: beyond these a system has not
# computed what it was asked for.
AGREEMENT = 0.1
AGREEMENT_OF_ONE = 0.5


def memory_share(engines: int) -> float | None:
    """Of a GPU's memory, for each of so many engines that are up at once; None without a GPU."""
    import torch

    return round(GPU_MEMORY / engines, 3) if torch.cuda.is_available() else None
