"""Small system-KV files for tests, ways to damage them, and how they are refused."""

import json
import os
import signal
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch

from vllm_relay.system_kv.file import SystemKVError, SystemKVFile, write_file
from vllm_relay.system_kv.manifest import Layer, Manifest

# Odd sizes, and two layers of different shapes.
LAYERS = (
    Layer("model.layers.0.self_attn.attn", kv_heads=3, head_size=5),
    Layer("model.layers.1.self_attn.attn", kv_heads=1, head_size=7, k_scale=0.5, v_scale=2.0),
)


def small_manifest(**changes: Any) -> Manifest:
    """A complete manifest of 7 tokens and two layers; ``changes`` replace its fields."""
    given: dict[str, Any] = {
        "name": "acme",
        "kind": "system-prompt",
        "token_ids": (1, 9690, 198, 2683, 359, 2, 4093),
        "text": "You are Acme's assistant. Sei höflich.",
        "model": "/models/small",
        "weights": "a1" * 32,
        "tokenizer": "b2" * 32,
        "chat_template": "c3" * 32,
        "rope": {"rope_theta": 10000.0, "rope_type": "default"},
        "config": {"hidden_size": 15, "num_hidden_layers": 2, "hidden_act": "silu"},
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "quantization": None,
        "layers": LAYERS,
        "engine": {"vllm": "0.32.0", "device": "cpu"},
        "created": "2026-01-31T12:00:00+01:00",
        "checksums": {},
    }
    assert changes.keys() <= given.keys()
    return Manifest(**(given | changes))


def small_tensors(manifest: Manifest, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random keys and values in the manifest's dtype; the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, manifest.dtype)
    return {
        name: torch.randn(shape, generator=random).to(dtype)
        for name, shape in manifest.shapes().items()
    }


def write(
    path: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor], scratch: str = ".scratch"
) -> int:
    """`write_file`, with a scratch folder beside the file."""
    folder = path.parent / scratch
    folder.mkdir(exist_ok=True)
    return write_file(path, manifest, tensors, folder)


def write_small(folder: Path, **changes: Any) -> Path:
    """Write a small valid file into a folder; returns its path.

    Args:
        folder: exists. changes: fields of `Manifest` that differ from `small_manifest`; the file is
            named after ``name``. ``seed`` (0) chooses other values of keys and values.
    """
    seed = changes.pop("seed", 0)
    manifest = small_manifest(**changes)
    path = folder / f"{manifest.name}.relay"
    write(path, manifest, small_tensors(manifest, seed))
    return path


def split(path: Path) -> tuple[bytes, bytes]:
    """A file's header, as it stands between the 8 bytes of its length and the tensors; the rest."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return content[8:end], content[end:]


def put_together(path: Path, header: bytes, body: bytes, *, reseal: bool = False) -> None:
    """Write a file from its two parts.

    Args:
        path: where. header, body: as `split` gives them.
        reseal: put the right seal into the body, as only the writer of a file does.
    """
    start = struct.pack("<Q", len(header)) + header
    if reseal:
        at, end = json.loads(header)["seal"]["data_offsets"]
        body = body[:at] + blake3.blake3(start).digest() + body[end:]
    path.write_bytes(start + body)


def edit_header(path: Path, old: str, new: str, *, reseal: bool = False) -> None:
    """Replace one piece of a header's text; offsets and tensors stay valid.

    Args:
        path: a valid file. old: occurs once; a quotation mark of the manifest is written ``\\"``.
        new: of any length; the header is filled up with spaces, as safetensors does.
        reseal: see `put_together`.
    """
    header, body = split(path)
    assert header.count(old.encode()) == 1, old
    header = header.replace(old.encode(), new.encode())
    put_together(path, header + b" " * (-len(header) % 8), body, reseal=reseal)


def edit_manifest(path: Path, *, reseal: bool = True, **changes: Any) -> None:
    """Replace entries of the manifest by any JSON values; ``...`` takes an entry out."""
    header, body = split(path)
    parsed = json.loads(header)
    (key,) = parsed["__metadata__"]
    manifest = json.loads(parsed["__metadata__"][key]) | changes
    manifest = {name: value for name, value in manifest.items() if value is not ...}
    parsed["__metadata__"][key] = json.dumps(manifest, sort_keys=True)
    put_together(path, json.dumps(parsed).encode(), body, reseal=reseal)


def files_in(folder: Path) -> list[str]:
    """Names of the files that lie in a folder itself."""
    return sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())


def refusal(path: Path) -> str:
    """The message with which a file is refused, when it is opened or when it is verified."""
    with pytest.raises(SystemKVError) as caught:
        SystemKVFile(path).verify()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert message.startswith(f"{path}: "), message
    return message.removeprefix(f"{path}: ")


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fail what hangs, instead of hanging with it."""

    def fail(*_: object) -> None:
        pytest.fail(f"not done after {seconds} s")  # no OSError: nobody may catch it

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
