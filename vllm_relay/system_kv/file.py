"""The system-KV file: one prompt's keys and values, and everything that says where they belong.

A file is a safetensors file. Per layer it holds two tensors, ``{layer}.k`` and ``{layer}.v``, each
``[tokens, kv_heads, head_size]``: keys after RoPE, values as projected, all KV heads of the model,
no blocks and no tensor-parallel slices, so that any block size, block layout and degree can load
it. The manifest is JSON in the safetensors metadata.

Every byte is guarded. The manifest holds a BLAKE3 digest of each tensor; the last tensor, the seal,
is the BLAKE3 digest of the header that holds the manifest. So an edited manifest, a flipped bit and
a cut-off file are all seen, and opening a file reads its header only.

A file appears under its name complete or not at all: it is written under another name in the same
folder, synced and renamed.
"""

import json
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import blake3
import safetensors
import torch
from safetensors.torch import save_file

FORMAT = 1
MANIFEST_KEY = "vllm_relay.system_kv"
SEAL = "seal"
_SEAL_BYTES = 32
# safetensors' own limit
_MAX_HEADER = 100_000_000


class SystemKVError(ValueError):
    """A system-KV file that cannot be used; one line that says which and why."""


@dataclass(frozen=True)
class Layer:
    """One attention layer: its name in vLLM's model, its shape, the scales of a quantised cache."""

    name: str
    kv_heads: int
    head_size: int
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class Manifest:
    """What a file says about itself.

    Attributes:
        name: what the prompt is called in logs and counters.
        kind: "system-prompt", "text" or "token-ids": what it was built from.
        token_ids: the tokens whose KV the file holds, from position 0 on.
        text: the same, decoded; None without a tokenizer.
        model: the model as it was named when the file was built; not compared.
        weights, tokenizer, chat_template: digests, see `vllm_relay.system_kv.digest`; None where
            there is none (no tokenizer; not built from a chat).
        rope, config: what of the model's configuration its KV depends on, see
            `vllm_relay.system_kv.identity`.
        dtype: of the tensors and of the model. kv_cache_dtype: vLLM's ``--kv-cache-dtype``.
        quantization: vLLM's ``--quantization`` as resolved, or None.
        layers: in the order of the model.
        engine: versions and settings of the engine that computed the KV; not compared.
        created: ISO 8601, with time zone.
        checksums: BLAKE3 of each tensor's bytes, hexadecimal, by tensor name.
    """

    name: str
    kind: str
    token_ids: tuple[int, ...]
    text: str | None
    model: str
    weights: str
    tokenizer: str | None
    chat_template: str | None
    rope: Mapping[str, Any]
    config: Mapping[str, Any]
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    layers: tuple[Layer, ...]
    engine: Mapping[str, str]
    created: str
    checksums: Mapping[str, str]
    format: int = FORMAT

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shape ``(tokens, kv_heads, head_size)`` of each tensor, by name."""
        return {
            name: (self.tokens, layer.kv_heads, layer.head_size)
            for layer in self.layers
            for name in tensor_names(layer.name)
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Manifest":
        """Raises KeyError, TypeError or ValueError where something is missing or misshapen."""
        values = {field.name: given[field.name] for field in fields(cls)}
        values["token_ids"] = tuple(int(token) for token in given["token_ids"])
        values["layers"] = tuple(Layer(**layer) for layer in given["layers"])
        return cls(**values)


def tensor_names(layer: str) -> tuple[str, str]:
    """The names of a layer's keys and values in the file."""
    return f"{layer}.k", f"{layer}.v"


def checksum(tensor: torch.Tensor) -> str:
    """BLAKE3 of a dense CPU tensor's bytes, on as many threads as this process may use."""
    data = tensor.contiguous().view(torch.uint8).flatten().numpy()
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hasher.update(data.data)
    return hasher.hexdigest()


def write_file(
    path: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor], scratch: Path
) -> int:
    """Write a file, whole or not at all; an older one of that name stays until it is replaced.

    Args:
        path: where. manifest: its ``checksums`` are filled in here.
        tensors: by name, CPU, ``[tokens, kv_heads, head_size]``, see `tensor_names`.
        scratch: an existing folder on the same file system, for the unfinished file.

    Returns:
        The size of the file in bytes.

    Raises:
        SystemKVError: a tensor is missing or misshapen. OSError: the disk is full, say.
    """
    shapes = manifest.shapes()
    if tensors.keys() != shapes.keys():
        odd = min(tensors.keys() ^ shapes.keys())
        raise SystemKVError(f"{path}: tensor {odd} is missing, or is of no layer of the manifest")
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape), str(tensors[name].dtype).removeprefix("torch.")
        if found != (shape, manifest.dtype):
            raise SystemKVError(
                f"{path}: tensor {name} must be {shape} {manifest.dtype}, is {found[0]} {found[1]}"
            )
    given = asdict(manifest) | {"checksums": {name: checksum(t) for name, t in tensors.items()}}
    manifest = Manifest.from_dict(given)
    unfinished = scratch / f"{path.name}.unfinished"
    seal = torch.zeros(_SEAL_BYTES, dtype=torch.uint8)
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file({**dense, SEAL: seal}, unfinished, metadata={MANIFEST_KEY: manifest.to_json()})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path}: {error}") from None
    os.chmod(unfinished, 0o600)
    with unfinished.open("r+b") as file:
        header = _read_header(file, path)
        file.seek(header.seal_at)
        file.write(header.digest)
        file.flush()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
    return size


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise TypeError(f"{number!r} is not an offset")
    return number


@dataclass(frozen=True)
class _Header:
    tensors: Mapping[str, Any]
    metadata: Mapping[str, Any]
    digest: bytes
    seal_at: int
    file_size: int


def _read_header(file: Any, path: Path) -> _Header:
    """The safetensors header: 8 bytes of its length (little endian), then JSON."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= _MAX_HEADER:
        raise SystemKVError(f"{path}: is not a system-KV file")
    if 8 + length > size:
        raise SystemKVError(f"{path}: is truncated: {size:,} bytes, its header alone has more")
    raw = file.read(length)
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        ends = [_whole(entry["data_offsets"][1]) for entry in header.values()]
        seal_begin, seal_end = map(_whole, header[SEAL]["data_offsets"])
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
        raise SystemKVError(f"{path}: is not a system-KV file, or its header is damaged") from None
    expected = 8 + length + max(ends)
    if size != expected:
        verb = "is truncated" if size < expected else "has bytes after its end"
        raise SystemKVError(f"{path}: {verb}: {size:,} bytes of {expected:,}")
    if not 0 <= seal_begin == seal_end - _SEAL_BYTES:
        raise SystemKVError(f"{path}: its header is damaged")
    digest = blake3.blake3(start + raw).digest()
    return _Header(header, metadata, digest, 8 + length + seal_begin, size)


class SystemKVFile:
    """A file opened for reading: its header is checked, its tensors are mapped when asked for.

    Args:
        path: the file.

    Attributes:
        path, manifest, size (bytes).
        seal: hexadecimal digest that stands for the whole content.

    Raises:
        SystemKVError: not a readable, complete, unchanged file of a known format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            mode = os.stat(self.path).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
                raise SystemKVError(f"{self.path}: is {kind}, not a system-KV file")
            # Kept open: whatever gets the name later, tensors are read from this file.
            self._file = self.path.open("rb", buffering=0)
            header = _read_header(self._file, self.path)
            self._file.seek(header.seal_at)
            seal = self._file.read(_SEAL_BYTES)
        except OSError as error:
            raise SystemKVError(f"{self.path}: {error.strerror or error}") from None
        given = self._manifest_dict(header.metadata)
        if seal != header.digest:
            raise SystemKVError(
                f"{self.path}: the manifest is not the one that was written with it (its checksum "
                "differs): the file is damaged or was edited"
            )
        try:
            self.manifest = Manifest.from_dict(given)
            self._check_tensors(header.tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise SystemKVError(f"{self.path}: the manifest is malformed: {error}") from None
        self.seal = seal.hex()
        self.size = header.file_size

    def _manifest_dict(self, metadata: Any) -> dict[str, Any]:
        """The manifest, of a format that this version reads.

        The format comes before the seal: a later format may guard itself in another way.
        """
        try:
            given = json.loads(metadata[MANIFEST_KEY])
            written = given["format"]
        except (KeyError, TypeError, ValueError, RecursionError):
            raise SystemKVError(
                f"{self.path}: is a safetensors file, but not a system-KV file"
            ) from None
        if written != FORMAT:
            newer = isinstance(written, int) and written > FORMAT
            raise SystemKVError(
                f"{self.path}: has format {written!r}; this version of vllm-relay reads {FORMAT}"
                + (": install a newer one, or build the file anew" if newer else "")
            )
        return dict(given)

    def _check_tensors(self, entries: Mapping[str, Any]) -> None:
        shapes = self.manifest.shapes()
        if not entries.keys() - {SEAL} == shapes.keys() == self.manifest.checksums.keys():
            raise ValueError("it does not name the tensors in the file")
        for name, shape in shapes.items():
            if entries[name]["shape"] != list(shape):
                raise ValueError(f"tensor {name} has the shape {entries[name]['shape']}")

    def tensors(self, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, mapped from the file; their checksums are compared.

        Args:
            layer: a name in the manifest.

        Returns:
            Two CPU tensors ``[tokens, kv_heads, head_size]``.

        Raises:
            SystemKVError: a checksum differs.
        """
        names = tensor_names(layer)
        try:
            opened = f"/proc/self/fd/{self._file.fileno()}"
            with safetensors.safe_open(opened, framework="pt") as file:
                keys, values = (file.get_tensor(name) for name in names)
        except (OSError, safetensors.SafetensorError) as error:
            raise SystemKVError(f"{self.path}: {error}") from None
        for name, tensor in zip(names, (keys, values), strict=True):
            if checksum(tensor) != self.manifest.checksums[name]:
                raise SystemKVError(f"{self.path}: tensor {name} is damaged: checksum differs")
        return keys, values

    def verify(self) -> None:
        """Compare the checksums of all tensors.

        Raises:
            SystemKVError: the first that differs.
        """
        for layer in self.manifest.layers:
            self.tensors(layer.name)
