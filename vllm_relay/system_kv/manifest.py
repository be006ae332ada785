"""The manifest of a system-KV file: where its keys and values belong; every field is checked."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    with_config,
)

from vllm_relay.validation import Count, Line, Positive

FORMAT = 2
# Format 1 has no layers that begin behind the first token.
FORMATS = (1, FORMAT)
DType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
Kind = Literal["system-prompt", "text", "token-ids"]
# safetensors' names of the dtypes that keys and values have.
_TENSOR_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def _timestamp(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"created has no time zone: {text!r}")
    return text


TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Scale = Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Layer:
    """One attention layer: its name in vLLM's model, its shape, the scales of a quantised cache.

    ``first_token``: the first whose KV the file holds; requests see none before it.
    """

    name: Line
    kv_heads: Positive
    head_size: Positive
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    first_token: Count = 0


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that the KV of an engine depends on, beside the tokens.

    ``model`` is its name, which is not compared; ``weights``, ``tokenizer`` and ``chat_template``
    are digests (`vllm_relay.system_kv.digest`); ``rope`` and ``config`` are settings of the model.
    """

    model: Line
    weights: Line
    tokenizer: Line | None
    chat_template: Line | None
    rope: Mapping[str, Any]
    config: Mapping[str, Any]
    dtype: DType
    kv_cache_dtype: Line
    quantization: Line | None


@dataclass(frozen=True, kw_only=True)
class Manifest(Identity):
    """The description of a file: the identity of the engine that computed the KV, and the prompt.

    Attributes:
        name: the prompt's name in logs and counters.
        kind: the prompt's source: "system-prompt", "text" or "token-ids".
        token_ids: the prompt's tokens, from position 0 on.
        text: the tokens decoded; None without a tokenizer.
        layers: in the order of the model.
        engine: versions and settings of the engine that computed the KV; not compared.
        created: ISO 8601, with time zone.
        checksums: hexadecimal BLAKE3 of each tensor's bytes, by tensor name.
    """

    name: Line
    kind: Kind
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    text: StrictStr | None
    layers: tuple[Layer, ...]
    engine: Mapping[Line, Line]
    created: Annotated[StrictStr, AfterValidator(_timestamp)]
    checksums: Mapping[str, StrictStr]
    format: StrictInt = FORMAT

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shape ``(tokens, kv_heads, head_size)`` of each tensor, by name.

        Raises ValueError for a layer that begins past the last token.
        """
        if past := [layer for layer in self.layers if layer.first_token >= self.tokens]:
            raise ValueError(
                f"layer {past[0].name} begins at token {past[0].first_token:,} of {self.tokens:,}"
            )
        return {
            name: (self.tokens - layer.first_token, layer.kv_heads, layer.head_size)
            for layer in self.layers
            for name in tensor_names(layer.name)
        }

    @property
    def tensor_dtype(self) -> str:
        """The name of `dtype` in a safetensors header."""
        return _TENSOR_DTYPES[self.dtype]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def tensor_names(layer: str) -> tuple[str, str]:
    """The names of a layer's keys and values in the file."""
    return f"{layer}.k", f"{layer}.v"
