"""Identity: everything that an engine's KV depends on, and its comparison with a file.

KV is a function of the tokens, the weights and the model's configuration. Two engines of the same
`Identity` agree on it; block size, layout, tensor parallelism and scheduling may differ and change
at most the order of summation. A version of vLLM may also have a fault that the next one has not.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from vllm_relay.system_kv.digest import (
    default_chat_template,
    digest_chat_template,
    digest_code,
    digest_tokenizer,
    digest_weights,
)
from vllm_relay.system_kv.file import SystemKVError
from vllm_relay.system_kv.manifest import DType, Identity, Manifest

# Settings of a Hugging Face config that KV does not depend on; RoPE is compared on its own.
# fmt: off
_NOT_COMPARED = {
    "_name_or_path", "_model_name_or_path", "attn_implementation", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "max_position_embeddings", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "tie_word_embeddings",
    "torch_dtype", "transformers_version", "use_cache", "vocab_size",
}
# fmt: on
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
# Formats that read the same files as `digest_weights`.
_LOAD_FORMATS = (
    "auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "mistral", "gguf",
)  # fmt: skip
# RoPE types that depend on lengths beside their parameters.
_ROPE_BY_LENGTH = ("longrope", "su", "dynamic")


def identify(vllm_config: Any, chat_template: str | None = None) -> Identity:
    """The identity of an engine with this configuration; reads all weight files once.

    Args:
        chat_template: the value of ``--chat-template``; None for the model's own.

    Raises:
        SystemKVError: the weights or the tokenizer cannot be read.
    """
    model = vllm_config.model_config
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in _LOAD_FORMATS:
        raise SystemKVError(
            f"weights of load format {load_format} cannot be told apart; system KVs need one of "
            + ", ".join(_LOAD_FORMATS)
        )
    # Through JSON, as a file keeps it.
    hf = json.loads(json.dumps(model.hf_text_config.to_dict(), default=str))
    config = {k: v for k, v in hf.items() if k not in _NOT_COMPARED and k not in _ROPE}
    for name, holder in (
        ("quantization_config", model.hf_config),
        ("--quantization-config", model),
    ):
        given = getattr(holder, "quantization_config", None)
        config[name] = json.loads(json.dumps(given, default=str))
    tokenizer = None
    if not model.skip_tokenizer_init:
        folder = local_folder(model.tokenizer, model.tokenizer_revision, vllm_config)
        tokenizer = digest_tokenizer(folder)
        chat_template = read_chat_template(chat_template) or default_chat_template(folder)
    try:
        folder = local_folder(model.model, model.revision, vllm_config)
        weights = digest_weights(folder)
        if model.trust_remote_code and (code := digest_code(folder)):
            config["own code"] = code
    except OSError as error:
        raise SystemKVError(f"the weights cannot be read for comparison: {error}") from None
    return Identity(
        model=str(model.model),
        weights=weights,
        tokenizer=tokenizer,
        chat_template=chat_template and digest_chat_template(chat_template),
        rope=_rope(hf, model.max_model_len),
        config=config,
        dtype=cast(DType, str(model.dtype).removeprefix("torch.")),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        quantization=model.quantization and str(model.quantization),
    )


def engine_settings(vllm_config: Any) -> dict[str, str]:
    """A manifest's ``engine``: versions and settings of this engine."""
    from vllm.platforms import current_platform

    backend = vllm_config.attention_config.backend
    return {
        "vllm": version("vllm"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "vllm_relay": version("vllm-relay"),
        "device": str(current_platform.get_device_name()),
        "attention_backend": "chosen by vLLM" if backend is None else backend.name,
        "tensor_parallel_size": str(vllm_config.parallel_config.tensor_parallel_size),
    }


def local_folder(name: str, revision: str | None, vllm_config: Any) -> Path:
    """The folder (or single file) of a model or tokenizer, given by path or hub name.

    Missing files are downloaded to where vLLM looks for them. Raises SystemKVError on failure.
    """
    if os.path.exists(name):
        return Path(name)
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=vllm_config.load_config.download_dir,
                # Weights of other kinds are there if the engine has downloaded them before.
                allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"],
                local_files_only=huggingface_hub.constants.HF_HUB_OFFLINE,
            )
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SystemKVError(f"model {name} cannot be read for comparison: {reason}") from None


def read_chat_template(given: str | None) -> str | None:
    """The text of ``--chat-template``: a file, a template of vLLM's, or the text itself.

    Raises SystemKVError if it is none of them.
    """
    if given is None:
        return None
    from vllm.transformers_utils.chat_templates.registry import CHAT_TEMPLATES_DIR

    for path in (Path(given), Path(CHAT_TEMPLATES_DIR) / given):
        with suppress(OSError):  # also: a text too long for a file name
            return path.read_text()
    if any(character in given for character in "{}\n"):
        return given
    raise SystemKVError(f"chat template {given}: no such file")


def differences(manifest: Manifest, identity: Identity) -> list[str]:
    """The differences between a file and an engine, one phrase each; empty when it fits."""
    found = []
    for field, title in (
        ("weights", "the model's weights"),
        ("tokenizer", "the tokenizer"),
        ("chat_template", "the chat template"),
    ):
        theirs, ours = getattr(manifest, field), getattr(identity, field)
        # Built from token ids or plain text, or an engine without a tokenizer.
        if theirs is None or (ours is None and field != "weights"):
            continue
        if theirs != ours:
            ours = ours and ours[:12]
            found.append(f"{title} (file {theirs[:12]}, engine {ours or 'none'})")
    if manifest.rope != identity.rope:
        found += _entries("RoPE", manifest.rope, identity.rope, both=False)
    # Settings that only one version of the library knows have no counterpart.
    other = manifest.engine.get("transformers") != version("transformers")
    found += _entries("the model's", manifest.config, identity.config, both=other)
    for field, title in (
        ("dtype", "dtype"),
        ("kv_cache_dtype", "KV cache dtype"),
        ("quantization", "quantization"),
    ):
        theirs, ours = getattr(manifest, field), getattr(identity, field)
        if theirs != ours:
            found.append(f"{title} (file {theirs}, engine {ours})")
    return found


def other_engine(manifest: Manifest) -> list[str]:
    """As `differences`: another minor version of vLLM built the file, which keeps its faults."""
    theirs, ours = manifest.engine.get("vllm", "unknown"), version("vllm")
    if theirs.split(".")[:2] == ours.split(".")[:2]:
        return []
    return [f"vLLM's version (file {theirs}, engine {ours}; allowed by system_kv.other_engines)"]


def _entries(
    title: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], *, both: bool
) -> Iterator[str]:
    """A phrase per differing entry; ``both``: only entries that both have."""
    keys = theirs.keys() & ours.keys() if both else theirs.keys() | ours.keys()
    for key in sorted(keys):
        if theirs.get(key) != ours.get(key):
            yield f"{title} {key} (file {theirs.get(key)}, engine {ours.get(key)})"


def _rope(hf: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    """The settings that decide how positions are rotated, as one flat dictionary."""
    found: dict[str, Any] = {}
    for key in _ROPE:
        value = hf.get(key)
        if isinstance(value, Mapping):
            found |= {name: entry for name, entry in value.items() if entry is not None}
        elif value is not None:
            found[key] = value
    # One for all layers, or one for each kind of them.
    each = [found, *(entry for entry in found.values() if isinstance(entry, Mapping))]
    kinds = {str(rope.get("rope_type", rope.get("type", "default"))) for rope in each}
    if kinds != {"default"}:
        found["max_position_embeddings"] = hf.get("max_position_embeddings")
    if kinds & set(_ROPE_BY_LENGTH):
        found["max_model_len"] = max_model_len
    return found
