"""All settings of vllm-relay, validated."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, StrictBool, with_config

from vllm_relay.validation import Amount, Count, Positive, Text, checked

# Name in vLLM's AttentionBackendEnum.
BACKEND_NAME = "RELAY"
# Our KV connectors in vLLM: the first loads system-KV files, the second builds them.
CONNECTOR, CONNECTOR_MODULE = "SystemKVConnector", "vllm_relay.system_kv.connector"
CAPTURE_CONNECTOR = "CaptureConnector"


def _path(given: Any) -> Any:
    """A path as text."""
    return os.fspath(given) if isinstance(given, os.PathLike) else given


def _paths(given: Any) -> tuple[Any, ...]:
    """One path or several, as text."""
    return tuple(map(_path, given if isinstance(given, (list, tuple)) else [given]))


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class SystemKVConfig:
    """Offline system KVs to load at start, and what else stays in the KV cache.

    Attributes:
        files: paths of files that ``vllm-relay build`` has written.
        budget: the share of the KV cache, from 0 to 1, that may be pinned; ``learn`` retains what
            files leave of it.
        errors: for a file that does not fit, "stop" the start, or "skip" the file and log it.
        salts: path of a JSON file, path of a system-KV file -> ``cache_salt``. Only requests with
            this salt find it; a file without one is found by all requests without a salt.
        other_engines: load files that another minor version of vLLM has built.
        metric_names: label the metrics with the prompts' names, not with digests.
        learn: evict the free blocks of the hottest prefixes last.
        remember: folder in which the hottest prefixes are saved, and from which they are loaded at
            start; implies ``learn``.
        remember_gib: the most that files in this folder may take, in GiB.
        pins: let requests pin, unpin, list and save prefixes, as ``vllm-relay pin`` does.
    """

    files: Annotated[tuple[Text, ...], BeforeValidator(_paths)] = ()
    budget: Annotated[Amount, Field(le=1)] = 0.5
    errors: Literal["stop", "skip"] = "stop"
    salts: Text | None = None
    other_engines: StrictBool = False
    metric_names: StrictBool = False
    learn: StrictBool = False
    remember: Annotated[Text | None, BeforeValidator(_path)] = None
    remember_gib: Annotated[Amount, Field(gt=0)] = 8.0
    pins: StrictBool = False

    @property
    def learns(self) -> bool:
        """True if hot prefixes are counted and retained."""
        return self.learn or self.remember is not None

    @classmethod
    def from_mapping(cls, given: Any) -> "SystemKVConfig":
        """Read settings: a mapping of the attributes, one path, or a list of paths.

        Raises:
            ValueError: an unknown setting or a bad value, by name.
        """
        if not isinstance(given, cls):
            given = dict(given) if isinstance(given, Mapping) else {"files": given}
        return checked(cls, given, "system_kv.")


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class RelayConfig:
    """Settings of the relay backend, checked by `from_additional_config`.

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
            attention. FlashAttention 3 fills all processors with either, so this is off.
        dense: CUDA only. Attend the group that saves most, of those whose blocks are adjacent in
            memory, as dense KV, with one more attention call per layer. None: True if system KVs
            are pinned, whose blocks mostly are adjacent.
        max_copy_gib: CPU only. Upper bound of packed segments, in GiB per worker and KV cache
            group; other segments are read in place. None: 2, or what fits into half of the memory
            that the KV cache leaves.
        scrub: CPU only, for canaries. Compare one random packed block of every relayed step with
            the KV cache, and one random row of one layer with vLLM's own attention. A difference
            is a fallback.
        system_kv: files to load: a path, a list of paths, or the settings of `SystemKVConfig`.
    """

    enabled: StrictBool = True
    min_saved_tokens: Count | None = None
    max_levels: Positive | None = None
    overlap: StrictBool = False
    dense: StrictBool | None = None
    max_copy_gib: Amount | None = None
    scrub: StrictBool = False
    system_kv: Annotated[SystemKVConfig, PlainValidator(SystemKVConfig.from_mapping)] = field(
        default_factory=SystemKVConfig
    )

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "RelayConfig":
        """Read the ``relay`` entry of vLLM's ``additional_config``.

        Raises:
            ValueError: an unknown setting or a bad value, by name.
        """
        given = additional_config.get("relay", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ValueError(f"additional_config['relay'] must be a mapping, got {given!r}")
        return checked(cls, dict(given), "relay.")


def only_system_kv(kv_transfer_config: Any) -> bool:
    """True if vLLM's KVTransferConfig (or None) names no KV connector, or ours alone."""
    return kv_transfer_config is None or kv_transfer_config.kv_connector in (None, CONNECTOR)


def configured(options: Any) -> bool:
    """True if vLLM's EngineArgs or VllmConfig names relay's settings or one of our connectors."""
    given, connectors = options.additional_config, str(options.kv_transfer_config)
    named = isinstance(given, Mapping) and "relay" in given
    return named or CONNECTOR in connectors or CAPTURE_CONNECTOR in connectors


def is_asked_for(options: Any) -> bool:
    """True if vLLM's EngineArgs or VllmConfig select the backend, or have settings of ours."""
    attention = options.attention_config
    given = attention if isinstance(attention, Mapping) else vars(attention)
    selected = [getattr(options, "attention_backend", None), given.get("backend")]
    selected += (given.get("backend_per_kind") or {}).values()
    # By member, or by name in any case.
    names = {str(getattr(backend, "name", backend)).upper() for backend in selected}
    return configured(options) or BACKEND_NAME in names
