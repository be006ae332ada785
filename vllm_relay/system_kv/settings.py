"""From the files an operator names to a configured connector: read, check, refuse or hand on.

Runs where vLLM makes its configuration, before any process of the engine is started: a file that
does not fit stops the start with one line, not after minutes of loading.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from vllm_relay import metrics
from vllm_relay.config import CONNECTOR, RelayConfig, SystemKVConfig
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.identity import differences, identify

MODULE = "vllm_relay.system_kv.connector"
# An entry of the connector's extra config, made here: [path, seal] of each file to load.
ADMITTED = "admitted"


def configure(engine_args: Any) -> None:
    """Give an engine the connector that its settings ask for; nothing without ``system_kv``.

    Args:
        engine_args: vLLM's EngineArgs; ``kv_transfer_config`` is set.

    Raises:
        ValueError: bad settings, or files named in two places.
    """
    ours = RelayConfig.from_additional_config(engine_args.additional_config).system_kv
    if not ours.files:
        return
    given = engine_args.kv_transfer_config
    if given is not None and any(True for _ in _our_entries(given)):
        raise ValueError(
            "system KVs are named twice: in additional_config['relay'] and in kv_transfer_config"
        )
    from vllm.config import KVTransferConfig

    extra = asdict(ours)
    extra["files"] = list(ours.files)
    entry: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        # A producer that has nothing to deliver: the role with the least influence on scheduling.
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    if given is None or given.kv_connector is None:
        engine_args.kv_transfer_config = KVTransferConfig(**entry)
        return
    # Beside another connector. Ours comes first: its blocks are the first of the pool.
    if given.kv_connector == "MultiConnector":
        children = list(given.kv_connector_extra_config.get("connectors", []))
    else:
        children = [{k: v for k, v in vars(given).items() if k != "engine_id"}]
    engine_args.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=given.kv_role,
        kv_connector_extra_config={"connectors": [entry, *copy.deepcopy(children)]},
    )


def _our_entries(kv_transfer_config: Any) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """(index, extra config) of our connector, alone (None) or among several; mutable."""
    if kv_transfer_config.kv_connector == CONNECTOR:
        yield None, kv_transfer_config.kv_connector_extra_config
    elif kv_transfer_config.kv_connector == "MultiConnector":
        for i, child in enumerate(kv_transfer_config.kv_connector_extra_config["connectors"]):
            if child.get("kv_connector") == CONNECTOR:
                yield i, child.setdefault("kv_connector_extra_config", {})


def admit(vllm_config: Any, chat_template: str | None) -> None:
    """Check the files of a configured connector and hand those that fit on to it.

    Args:
        vllm_config: vLLM's VllmConfig, complete.
        chat_template: the server's ``--chat-template``, or None.

    Raises:
        SystemKVError: a file does not fit and ``errors`` is "stop"; or the engine cannot use any.
    """
    if vllm_config.kv_transfer_config is None:
        return
    for index, extra in _our_entries(vllm_config.kv_transfer_config):
        if index:
            raise SystemKVError(f"{CONNECTOR} must be the first of MultiConnector's connectors")
        settings = SystemKVConfig.from_mapping(
            {key: value for key, value in extra.items() if key != ADMITTED}
        )
        reason = _unusable(vllm_config)
        if reason is not None:
            raise SystemKVError(f"system KVs cannot be loaded: {reason}")
        identity = identify(vllm_config, chat_template) if settings.files else None
        admitted = []
        for path in settings.files:
            try:
                file = SystemKVFile(path)
                found = differences(file.manifest, identity) if identity else []
                if found:
                    raise SystemKVError(f"{path}: differs from this engine in {', '.join(found)}")
                file.verify()
            except SystemKVError as error:
                if settings.errors == "stop":
                    raise
                metrics.say_once(f"system KV not loaded: {error}", logging.WARNING)
            else:
                admitted.append([str(file.path.absolute()), file.seal])
        extra[ADMITTED] = admitted


def _unusable(vllm_config: Any) -> str | None:
    """Why an engine cannot use system KVs, as far as its configuration tells; or None."""
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off; requests find them by it: remove --no-enable-prefix-caching"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "the KV cache's scales are found by the first request (--calculate-kv-scales)"
    if vllm_config.model_config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}"
    return None


def open_admitted(extra: Mapping[str, Any]) -> list[SystemKVFile]:
    """Open the checked files of a connector's extra config, in a process of the engine.

    Raises:
        SystemKVError: one was replaced since it was checked, or none was ever checked.
    """
    if ADMITTED not in extra:
        raise SystemKVError(
            "system KVs were not checked: start the engine through vLLM's EngineArgs (LLM, "
            "AsyncLLM, vllm serve) with the plugin vllm-relay enabled"
        )
    files = []
    for path, seal in extra[ADMITTED]:
        file = SystemKVFile(path)
        if file.seal != seal:
            raise SystemKVError(f"{path}: was replaced while the engine started")
        files.append(file)
    return files
