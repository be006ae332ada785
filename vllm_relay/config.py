"""Every knob of vllm-relay, validated once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class RelayConfig:
    """Settings of the relay backend.

    vLLM passes them through its own option for out-of-tree components:
    ``--additional-config '{"relay": {"max_copy_gib": 4}}'`` or ``LLM(additional_config={"relay":
    {...}})``.

    Attributes:
        enabled: False keeps the backend selected but every step on vLLM's own path (for
            comparisons).
        min_saved_tokens: a group is relayed when it saves at least this many KV token reads per
            step and layer, ``(members - 1) * shared tokens``. It stands where a fitted cost model
            will decide.
        max_copy_gib: CPU only. Upper bound, in GiB per worker and KV cache group, of the row-major
            copies of shared segments; a group that does not fit stays on vLLM's own path.
    """

    enabled: bool = True
    min_saved_tokens: int = 32768
    max_copy_gib: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ValueError(f"relay.enabled must be true or false, got {self.enabled!r}")
        for name, whole in (("min_saved_tokens", True), ("max_copy_gib", False)):
            value = getattr(self, name)
            kind = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not value >= 0:
                expected = "a whole number" if whole else "a number"
                raise ValueError(f"relay.{name} must be {expected} >= 0, got {value!r}")

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "RelayConfig":
        """Read the ``relay`` entry of vLLM's ``additional_config``.

        Raises:
            ValueError: an unknown knob or a bad value, by name.
        """
        given = additional_config.get("relay", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ValueError(f"additional_config['relay'] must be a mapping, got {given!r}")
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(
                f"unknown relay setting {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return cls(**given)
