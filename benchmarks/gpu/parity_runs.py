"""The engines that part ``parity`` compares."""

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.systems import PROBE_STEPS

# Steps of the case before that the counters may hear of late.
LAG = 3


@dataclass(frozen=True)
class Run:
    """One engine.

    Attributes:
        system: "stock", "relay" or "planted": relay with an error. relay: settings
            beside ``min_saved_tokens`` 0.
    """

    system: str
    runner: str = "v2"
    graphs: bool = True
    dtype: str = "bfloat16"
    relay: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        more = ", ".join(f"{name} {value}" for name, value in self.relay)
        graphs = "graphs" if self.graphs else "eager"
        return " ".join(filter(None, [self.runner, graphs, self.dtype, self.system, more]))

    def idle_steps(self, steps: int) -> int:
        """Steps that may count as relayed where none was: heard of late, or planned as a probe."""
        return LAG + (0 if self.runner == "v1" and self.graphs else steps // PROBE_STEPS + 1)


# Stock once per precision, before the runs that are held against it.
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
)
