"""All settings of vllm-relay, validated."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# Name in vLLM's AttentionBackendEnum.
BACKEND_NAME = "RELAY"
# Our KV connectors in vLLM: the first loads system-KV files, the second builds them.
CONNECTOR, CONNECTOR_MODULE = "SystemKVConnector", "vllm_relay.system_kv.connector"
CAPTURE_CONNECTOR = "CaptureConnector"


def _reject_unknown(given: Mapping[str, Any], known: list[str], title: str) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"unknown {title} {', '.join(unknown)}; known: {', '.join(known)}")


@dataclass(frozen=True)
class SystemKVConfig:
    """Offline system KVs to load at start.

    Attributes:
        files: paths of files that ``vllm-relay build`` has written.
        budget: the share of the KV cache, from 0 to 1, that may be pinned.
        errors: for a file that does not fit, "stop" the start, or "skip" the file and log it.
    """

    files: tuple[str, ...] = ()
    budget: float = 0.5
    errors: str = "stop"

    def __post_init__(self) -> None:
        files = [self.files] if isinstance(self.files, (str, os.PathLike)) else self.files
        if not isinstance(files, (list, tuple)) or not all(
            isinstance(file, (str, os.PathLike)) and os.fspath(file) for file in files
        ):
            raise ValueError(f"system_kv files must be a path or a list of paths, got {files!r}")
        object.__setattr__(self, "files", tuple(os.fspath(file) for file in files))
        number = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool)
        if not number or not 0 <= self.budget <= 1:
            raise ValueError(f"system_kv budget must be from 0 to 1, got {self.budget!r}")
        if self.errors not in ("stop", "skip"):
            raise ValueError(f"system_kv errors must be stop or skip, got {self.errors!r}")

    @classmethod
    def from_mapping(cls, given: Any) -> "SystemKVConfig":
        """Read settings: a mapping of the attributes, one path, or a list of paths.

        Raises:
            ValueError: an unknown setting or a bad value, by name.
        """
        if not isinstance(given, Mapping):
            return cls(files=given)
        _reject_unknown(given, [f.name for f in fields(cls)], "system_kv setting")
        return cls(**given)


@dataclass(frozen=True)
class RelayConfig:
    """Settings of the relay backend.

    They come through vLLM's option for out-of-tree components:
    ``--additional-config '{"relay": {"max_copy_gib": 4}}'``, ``--additional-config.relay.system_kv
    acme.relay`` or ``LLM(additional_config={"relay": {...}})``.

    Attributes:
        enabled: False leaves every step to vLLM's own path, for comparisons.
        min_saved_tokens: None relays groups where the device's measured costs predict a gain. A
            number relays the groups that read least, each saving at least so many KV token reads
            per step and layer, for tests and comparisons.
        max_levels: most levels of nested sharing in a step; each is one more attention call per
            layer. None: 3 on a CPU, 1 on CUDA.
        overlap: CUDA only. In CUDA graphs, run system attention on a second stream beside context
            attention.
        dense: CUDA only. Attend the group that saves most, of those whose blocks are adjacent in
            memory, as dense KV, with one more attention call per layer. None: True if system KVs
            are pinned, whose blocks mostly are adjacent.
        max_copy_gib: CPU only. Upper bound of packed segments, in GiB per worker and KV cache
            group; other segments are read in place.
        system_kv: files to load: a path, a list of paths, or the settings of `SystemKVConfig`.
    """

    enabled: bool = True
    min_saved_tokens: int | None = None
    max_levels: int | None = None
    overlap: bool = True
    dense: bool | None = None
    max_copy_gib: float = 2.0
    system_kv: SystemKVConfig = field(default_factory=SystemKVConfig)

    def __post_init__(self) -> None:
        for name in ("enabled", "overlap", "dense"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "dense" and value is None):
                raise ValueError(f"relay.{name} must be true or false, got {value!r}")
        whole, number = ("a whole number", int), ("a number", (int, float))
        for name, (expected, kind), least in (
            ("min_saved_tokens", whole, 0),
            ("max_levels", whole, 1),
            ("max_copy_gib", number, 0),
        ):
            value = getattr(self, name)
            if value is None and name != "max_copy_gib":
                continue
            if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
                raise ValueError(f"relay.{name} must be {expected} >= {least}, got {value!r}")
        if not isinstance(self.system_kv, SystemKVConfig):
            object.__setattr__(self, "system_kv", SystemKVConfig.from_mapping(self.system_kv))

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "RelayConfig":
        """Read the ``relay`` entry of vLLM's ``additional_config``.

        Raises:
            ValueError: an unknown setting or a bad value, by name.
        """
        given = additional_config.get("relay", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ValueError(f"additional_config['relay'] must be a mapping, got {given!r}")
        _reject_unknown(given, [f.name for f in fields(cls)], "relay setting")
        return cls(**given)


def only_system_kv(kv_transfer_config: Any) -> bool:
    """True if vLLM's KVTransferConfig (or None) names no KV connector, or ours alone."""
    return kv_transfer_config is None or kv_transfer_config.kv_connector in (None, CONNECTOR)


def configured(options: Any) -> bool:
    """True if vLLM's EngineArgs or VllmConfig names relay's settings or one of our connectors."""
    given, connectors = options.additional_config, str(options.kv_transfer_config)
    named = isinstance(given, Mapping) and "relay" in given
    return named or CONNECTOR in connectors or CAPTURE_CONNECTOR in connectors


def is_asked_for(vllm_config: Any) -> bool:
    """True if an engine with this VllmConfig selected the backend, or has settings of ours."""
    attention = vllm_config.attention_config
    selected = [attention.backend, *getattr(attention, "backend_per_kind", {}).values()]
    return configured(vllm_config) or any(
        getattr(backend, "name", None) == BACKEND_NAME for backend in selected
    )
