"""Models and engine setups of the parts ``engine-8b`` and ``engine-7b``."""

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.systems import MIN_SAVED_TOKENS


@dataclass(frozen=True)
class EngineSetup:
    """One way to serve a model.

    Attributes:
        settings: engine arguments. patches: see `engine_process`.
        against: the system whose rate ``times_stock`` is of. alone: only the cases without sharing.
        graphs: whether every timed step has to be a full CUDA graph.
    """

    name: str
    backend: str
    runner: str
    settings: tuple[tuple[str, Any], ...] = ()
    patches: tuple[str, ...] = ()
    against: str = "stock"
    alone: bool = False
    graphs: bool = True


# The threshold that the cases are judged by; relay's own depends on the device.
RELAY = (("additional_config", {"relay": {"min_saved_tokens": MIN_SAVED_TOKENS}}),)
SYSTEMS = (
    EngineSetup("stock", "FLASH_ATTN", "v2"),
    EngineSetup("relay", "RELAY", "v2", RELAY),
    EngineSetup(
        "cascade",
        "FLASH_ATTN",
        "v1",
        (("disable_cascade_attn", False),),
        ("benchmarks.gpu.engine_patches:count_cascades",),
        graphs=False,
    ),
)
# Runner V1 has one set of graphs, with relay in it: what does that cost where nothing is shared?
SYSTEMS_V1 = (
    EngineSetup("stock-v1", "FLASH_ATTN", "v1", against="stock-v1", alone=True),
    EngineSetup("relay-v1", "RELAY", "v1", RELAY, against="stock-v1", alone=True),
)
# part "engine-" + key -> its model and systems, in the order in which they run
PARTS = {
    "8b": ("llama-3-8b", (*SYSTEMS, *SYSTEMS_V1)),
    "7b": ("llama-2-7b", SYSTEMS),
}
