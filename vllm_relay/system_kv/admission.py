"""Admission of system-KV files: settings become a configured connector with checked files.

It runs while vLLM makes its configuration, before any process of the engine starts: a file that
does not fit stops the start with one line, not after minutes of loading.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_relay import compat, metrics
from vllm_relay.backend.engine_support import DRAFTS_WITHOUT_MODEL
from vllm_relay.config import CONNECTOR, CONNECTOR_MODULE, RelayConfig, SystemKVConfig
from vllm_relay.system_kv.cache_groups import STATE
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.identity import differences, identify, other_engine
from vllm_relay.system_kv.manifest import Identity
from vllm_relay.system_kv.remembered_files import hottest_first, prepare
from vllm_relay.validation import parse_json

# Entry of the connector's extra config, made here: [path, seal, salt] of each file to load.
ADMITTED = "admitted"
# Another, with `SystemKVConfig.remember`: {"identity": fields of the engine's `Identity`, "warm":
# paths of the remembered files that fit it, the hottest first}.
REMEMBERED = "remembered"


def configure(engine_args: Any) -> None:
    """Configure the connector that ``system_kv`` asks for, if it does.

    Args:
        engine_args: vLLM's EngineArgs; ``kv_transfer_config`` is set.

    Raises:
        ValueError: bad settings, files named in two places, or an option that replaces connectors.
    """
    from vllm.config import KVTransferConfig

    ours = RelayConfig.from_additional_config(engine_args.additional_config).system_kv
    given = engine_args.kv_transfer_config
    if isinstance(given, Mapping):
        given = KVTransferConfig(**given)
    present = [] if given is None else [read_settings(extra) for _, extra in _our_entries(given)]
    asked = bool(ours.files) or ours.learns or ours.pins
    if not asked and not present:
        return
    if engine_args.kv_offloading_size is not None:
        raise ValueError(
            "--kv-offloading-size replaces the connector of system_kv: name "
            "OffloadingConnector in --kv-transfer-config instead, both run then"
        )
    if present:
        if asked and present != [ours]:  # the same: these arguments were used before
            raise ValueError(
                "system KVs are named twice: in additional_config['relay'] and kv_transfer_config"
            )
        return
    entry: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        # A producer that has nothing to deliver: the role with the least influence on scheduling.
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {**asdict(ours), "files": list(ours.files)},
    }
    if given is None or given.kv_connector is None:
        engine_args.kv_transfer_config = KVTransferConfig(**entry)
        return
    # Beside another connector. Ours comes first: its blocks are the first of the pool.
    settings = dict(vars(given))
    if given.kv_connector == "MultiConnector":
        children = list(given.kv_connector_extra_config.get("connectors", []))
    else:
        children = [{k: v for k, v in settings.items() if k != "engine_id"}]
    settings["kv_connector"], settings["kv_connector_module_path"] = "MultiConnector", None
    settings["kv_connector_extra_config"] = {"connectors": [entry, *copy.deepcopy(children)]}
    engine_args.kv_transfer_config = KVTransferConfig(**settings)


def read_settings(extra: Mapping[str, Any]) -> SystemKVConfig:
    """The settings in a connector's extra config. Raises ValueError for a bad one, by name."""
    return SystemKVConfig.from_mapping(
        {k: v for k, v in extra.items() if k not in (ADMITTED, REMEMBERED)}
    )


def _our_entries(kv_transfer_config: Any) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """(index, extra config) of our connector, alone (None) or among several; mutable."""
    if kv_transfer_config.kv_connector == CONNECTOR:
        yield None, kv_transfer_config.kv_connector_extra_config
    elif kv_transfer_config.kv_connector == "MultiConnector":
        children = kv_transfer_config.kv_connector_extra_config.get("connectors", [])
        for i, child in enumerate(children):
            if child.get("kv_connector") == CONNECTOR:
                yield i, child.setdefault("kv_connector_extra_config", {})


def admit(vllm_config: Any, chat_template: str | None) -> None:
    """Check the files of a configured connector and give it those that fit.

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
        settings = read_settings(extra)
        # Nothing is written into blocks.
        retains = not settings.files and settings.remember is None
        what = "system KVs cannot be loaded"
        if retains and (settings.learn or settings.pins):
            what = f"system_kv.{'learn' if settings.learn else 'pins'} cannot be used"
        if settings.remember is not None and not settings.files:
            what = "system_kv.remember cannot be used"
        reason = _unusable(vllm_config, retains)
        if reason is None and settings.remember is not None:
            what = "system_kv.remember cannot be used"
            reason = _unsaved(vllm_config)
        if reason is not None:
            raise SystemKVError(f"{what}: {reason}")
        if settings.files or settings.remember is not None:
            identity = identify(vllm_config, chat_template)
        salts = _read_salts(settings)
        admitted = []
        for path in settings.files:
            try:
                file = _fitting(path, vllm_config, identity, settings)
                # Workers hash what they write once more: between here and there the tensors may
                # change, and the seal guards the header only.
                file.verify()
            except (SystemKVError, MemoryError, RuntimeError) as error:
                if settings.errors == "stop":
                    raise
                metrics.say_once(f"system KV not loaded: {error}", logging.WARNING)
            else:
                admitted.append([str(file.path.absolute()), file.seal, salts.get(path)])
        extra[ADMITTED] = admitted
        if settings.remember is not None:
            warm = _warm(Path(settings.remember), vllm_config, identity, settings)
            extra[REMEMBERED] = {"identity": asdict(identity), "warm": warm}


def _fitting(
    path: str | Path, vllm_config: Any, identity: Identity, settings: SystemKVConfig
) -> SystemKVFile:
    """A file of this engine's KV. Raises SystemKVError with the reason why it is not."""
    file = SystemKVFile(path)
    found = differences(file.manifest, identity)
    if not settings.other_engines:
        found += other_engine(file.manifest)
    if found:
        raise SystemKVError(f"{path}: differs from this engine in {', '.join(found)}")
    block = vllm_config.cache_config.block_size  # None: the backend will choose one
    if block and file.manifest.tokens < block:
        raise SystemKVError(f"{path}: has {file.manifest.tokens} tokens, a KV block has {block}")
    vocabulary = vllm_config.model_config.get_vocab_size()
    if max(file.manifest.token_ids) >= vocabulary:
        raise SystemKVError(f"{path}: has tokens beyond the {vocabulary:,} of the model")
    return file


def _warm(
    folder: Path, vllm_config: Any, identity: Identity, settings: SystemKVConfig
) -> list[str]:
    """Paths of the remembered files that fit this engine, the hottest first.

    Raises SystemKVError if nothing can be written into the folder.
    """
    prepare(folder)
    found, problems = [], []
    for path in hottest_first(folder):
        try:
            found.append(str(_fitting(path, vllm_config, identity, settings).path.absolute()))
        except (SystemKVError, MemoryError, RuntimeError) as error:
            problems.append(error)
    if not getattr(vllm_config, "shutdown_timeout", 0):
        metrics.say_once(
            "system_kv.remember: a server saves when it stops only with --shutdown-timeout",
            logging.INFO,
        )
    if problems:
        metrics.say_once(
            f"{len(problems)} remembered prefixes not loaded; the hottest: {problems[0]}"
        )
    return found


class Salt(str):
    """A ``cache_salt``; logs of a configuration do not show it."""

    def __repr__(self) -> str:
        return "'...'"


def _read_salts(settings: SystemKVConfig) -> dict[str, Salt]:
    """``cache_salt`` by path, as in ``settings.files``.

    Raises:
        SystemKVError: the file cannot be read, is of another form, or has a path not in ``files``.
    """
    if settings.salts is None:
        return {}
    where = f"system_kv.salts {settings.salts}: "
    try:
        salts = parse_json(Path(settings.salts).read_bytes(), where)
    except OSError as error:
        raise SystemKVError(f"{where}{error.strerror or error}") from None
    except ValueError as error:
        raise SystemKVError(str(error)) from None
    if not isinstance(salts, dict) or not all(isinstance(x, str) and x for x in salts.values()):
        # Without what is there: it is secret.
        raise SystemKVError(f"{where}must be an object of texts, none empty, by system-KV file")
    if unknown := sorted(salts.keys() - set(settings.files)):
        raise SystemKVError(f"{where}{unknown[0]} is not one of system_kv.files")
    return {path: Salt(salt) for path, salt in salts.items()}


def _unusable(vllm_config: Any, retains: bool) -> str | None:
    """The reason in its configuration why an engine cannot use system KVs, or None.

    ``retains``: it is to keep prefixes that requests have computed, and loads no file.
    """
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off; requests find them by it: remove --no-enable-prefix-caching"
    if vllm_config.model_config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    if vllm_config.model_config.has_inner_state:
        # With a KV connector vLLM 0.26 takes hits of full attention alone, and expects a state.
        return "the model has Mamba, gated-delta or convolution layers" if retains else STATE
    if retains:
        return None
    if compat.switch(vllm_config.cache_config, "calculate_kv_scales"):
        return "the KV cache's scales are found by the first request (--calculate-kv-scales)"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFTS_WITHOUT_MODEL:
        return f"speculation with {speculative.method} puts a draft's KV into the same blocks"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            return f"{name} is {size}"
    return None


def _unsaved(vllm_config: Any) -> str | None:
    """The reason in its configuration why an engine's KV cannot be saved, or None."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "it is made for the CPU engine"
    if vllm_config.model_config.use_mla:
        return "the model has multi-head latent attention"
    if (dtype := vllm_config.cache_config.cache_dtype) != "auto":
        return f"the KV cache's dtype is {dtype}"
    return None


def open_admitted(
    extra: Mapping[str, Any],
) -> tuple[list[SystemKVFile], list[str | None]]:
    """The admitted files, opened in a process of the engine, and the salt of each.

    Raises:
        SystemKVError: a file was replaced since it was checked, or none was ever checked.
    """
    if ADMITTED not in extra:
        raise SystemKVError(
            "system KVs were not checked: start the engine through vLLM's EngineArgs (LLM, "
            "AsyncLLM, vllm serve) with the plugin vllm-relay enabled"
        )
    files, salts = [], []
    for path, seal, salt in extra[ADMITTED]:
        file = SystemKVFile(path)
        if file.seal != seal:
            raise SystemKVError(f"{path}: was replaced while the engine started")
        files.append(file)
        salts.append(salt and str(salt))  # not a `Salt`: vLLM hashes what its pickle holds
    return files, salts
