"""The system-KV file: the keys and values of one prompt, and a manifest of where they belong.

A file is a safetensors file. Per layer it holds two tensors, ``{layer}.k`` and ``{layer}.v``, each
``[tokens, kv_heads, head_size]``: keys after RoPE, values as projected, all KV heads of the model;
of a layer with a sliding window only the last tokens. There are no KV blocks and no tensor-parallel
slices, so any block size, block layout and degree of parallelism can load it. The manifest is JSON
in the safetensors metadata.

Every byte is guarded. The manifest holds a BLAKE3 digest of each tensor; the last tensor, the seal,
is the BLAKE3 digest of the header that holds the manifest. An edited manifest, a flipped bit and a
truncated file are all detected, and opening a file reads its header only.

A file appears under its name complete or not at all: it is written elsewhere, synced and renamed.
"""

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blake3
import safetensors
import torch
from safetensors.torch import save_file

from vllm_relay.system_kv.manifest import FORMAT, FORMATS, Manifest, tensor_names
from vllm_relay.validation import checked, one_line

MANIFEST_KEY = "vllm_relay.system_kv"
SEAL = "seal"
_SEAL_BYTES = 32
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


class SystemKVError(ValueError):
    """A system-KV file that cannot be used; the message is one line with file and reason."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def checksum(tensor: torch.Tensor, threads: int = blake3.blake3.AUTO) -> str:
    """BLAKE3 of a CPU tensor's bytes, by default on as many threads as this process may use."""
    data = tensor.contiguous().view(torch.uint8).flatten().numpy()
    hasher = blake3.blake3(max_threads=threads)
    return hasher.update(data.data).hexdigest()


def write_file(
    path: Path,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    scratch: Path,
    threads: int = blake3.blake3.AUTO,
) -> int:
    """Write a file, whole or not at all; an older file of that name stays until it is replaced.

    Args:
        path: the file. manifest: its ``checksums`` are filled in here.
        tensors: CPU tensors ``[tokens, kv_heads, head_size]`` by name, see `tensor_names`.
        scratch: an existing folder on the same file system, for the unfinished file.
        threads: of `checksum`.

    Returns:
        The size of the file in bytes.

    Raises:
        SystemKVError: a tensor is missing, or its shape or dtype is not the manifest's.
        OSError: for example, the disk is full.
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
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    checksums = {name: checksum(tensor, threads) for name, tensor in dense.items()}
    text = replace(manifest, checksums=checksums).to_json()
    try:
        checked(Manifest, json.loads(text), "")
    except ValueError as error:
        raise SystemKVError(f"{path}: the manifest is malformed: {error}") from None
    unfinished = scratch / f"{path.name}.unfinished"
    seal = torch.zeros(_SEAL_BYTES, dtype=torch.uint8)
    try:
        save_file({**dense, SEAL: seal}, unfinished, metadata={MANIFEST_KEY: text})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path}: {error}") from None
    os.chmod(unfinished, 0o600)
    with unfinished.open("r+b") as file:
        header = _read_header(file, path)
        file.seek(header.seal_at)
        file.write(header.digest)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
    return header.file_bytes


@dataclass(frozen=True)
class _Header:
    tensors: Mapping[str, Any]
    metadata: Mapping[str, Any]
    digest: bytes
    seal_at: int
    file_bytes: int


def _read_header(file: Any, path: Path) -> _Header:
    """The safetensors header: its length in 8 bytes (little endian), then JSON."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise SystemKVError(f"{path}: is not a system-KV file")
    if 8 + length > size:
        raise SystemKVError(f"{path}: is truncated: {size:,} bytes, its header alone has more")
    raw = file.read(length)
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        if not all(type(number) is int for pair in offsets.values() for number in pair):
            raise TypeError("an offset that is not a whole number")
        expected = 8 + length + max(end for _, end in offsets.values())
        seal_begin, seal_end = offsets[SEAL]
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
        raise SystemKVError(f"{path}: is not a system-KV file, or its header is damaged") from None
    if size != expected:
        verb = "is truncated" if size < expected else "has bytes after its end"
        raise SystemKVError(f"{path}: {verb}: {size:,} bytes of {expected:,}")
    if not 0 <= seal_begin == seal_end - _SEAL_BYTES:
        raise SystemKVError(f"{path}: its header is damaged")
    digest = blake3.blake3(start + raw).digest()
    return _Header(header, metadata, digest, 8 + length + seal_begin, size)


class SystemKVFile:
    """A file opened for reading: its header is checked at once, its tensors when they are read.

    Attributes: path, manifest, size (bytes), seal (hexadecimal digest of the whole content).

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
        # The format comes before the seal: a later format may guard itself in another way.
        given = self._known_format(header.metadata)
        if seal != header.digest:
            raise SystemKVError(
                f"{self.path}: the manifest is not the one that was written with it (its checksum "
                "differs): the file is damaged or was edited"
            )
        try:
            self.manifest = checked(Manifest, given, "")
            self._shapes = shapes = self.manifest.shapes()
            size = getattr(torch, self.manifest.dtype).itemsize
            if shapes.keys() | {SEAL} != header.tensors.keys() or (
                shapes.keys() != self.manifest.checksums.keys()
            ):
                raise ValueError("it does not name the tensors in the file")
            for name, shape in shapes.items():
                entry = header.tensors[name]
                if (found := entry["shape"]) != list(shape):
                    raise ValueError(f"tensor {name} has the shape {found}")
                if (found := entry["dtype"]) != self.manifest.tensor_dtype:
                    raise ValueError(f"tensor {name} has the dtype {found}")
                begin, end = entry["data_offsets"]
                if begin < 0 or end - begin != math.prod(shape) * size:
                    raise ValueError(f"tensor {name} has the offsets {begin:,} and {end:,}")
        except (KeyError, TypeError, ValueError) as error:
            raise SystemKVError(f"{self.path}: the manifest is malformed: {error}") from None
        start = header.seal_at - header.tensors[SEAL]["data_offsets"][0]
        self._offsets = {name: start + header.tensors[name]["data_offsets"][0] for name in shapes}
        self.seal = seal.hex()
        self.size = header.file_bytes

    def _known_format(self, metadata: Any) -> dict[str, Any]:
        """The manifest as a dictionary. Raises SystemKVError if this version cannot read it."""
        try:
            given = json.loads(metadata[MANIFEST_KEY])
            written = given["format"]
        except (KeyError, TypeError, ValueError, RecursionError):
            raise SystemKVError(
                f"{self.path}: is a safetensors file, but not a system-KV file"
            ) from None
        if written not in FORMATS:
            newer = isinstance(written, int) and written > FORMAT
            known = " and ".join(map(str, FORMATS))
            raise SystemKVError(
                f"{self.path}: has format {written!r}; this version of vllm-relay reads {known}"
                + (": install a newer one, or build the file anew" if newer else "")
            )
        return dict(given)

    def tensors(
        self, layer: str, threads: int = blake3.blake3.AUTO
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer: CPU tensors ``[tokens, kv_heads, head_size]``.

        ``threads``: of `checksum`. Raises SystemKVError if they cannot be read or a checksum
        differs.
        """
        keys, values = (self._tensor(name, threads) for name in tensor_names(layer))
        return keys, values

    def _tensor(self, name: str, threads: int) -> torch.Tensor:
        # Read, not mapped: a file that is truncated meanwhile would end the process by SIGBUS.
        try:
            tensor = torch.empty(self._shapes[name], dtype=getattr(torch, self.manifest.dtype))
        except RuntimeError:  # a sparse file may claim more than there is memory
            raise SystemKVError(f"{self.path}: no memory for tensor {name}") from None
        data = tensor.view(torch.uint8).flatten().numpy().data
        at, done = self._offsets[name], 0
        try:
            while done < len(data):
                if not (count := os.preadv(self._file.fileno(), [data[done:]], at + done)):
                    raise SystemKVError(f"{self.path}: was truncated while it was read")
                done += count
        except OSError as error:
            raise SystemKVError(f"{self.path}: {error.strerror or error}") from None
        if checksum(tensor, threads) != self.manifest.checksums[name]:
            raise SystemKVError(f"{self.path}: tensor {name} is damaged: checksum differs")
        return tensor

    def verify(self) -> None:
        """Compare all checksums. Raises SystemKVError at the first that differs."""
        for layer in self.manifest.layers:
            self.tensors(layer.name)
