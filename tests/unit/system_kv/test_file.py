"""The system-KV file: what was written is read, and a file is there whole or not at all."""

import json
import os
import resource
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import blake3
import pytest
import safetensors
import torch

from tests.unit.system_kv.files import (
    LAYERS,
    edit_manifest,
    files_in,
    small_manifest,
    small_tensors,
    split,
    time_limit,
    write,
    write_small,
)
from vllm_relay.system_kv import file as file_module
from vllm_relay.system_kv.file import MANIFEST_KEY, SystemKVError, SystemKVFile, write_file
from vllm_relay.system_kv.manifest import Layer, tensor_names

ROOT = Path(__file__).parents[3]
NAME = LAYERS[0].name


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where they are not numbers."""
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# Written and read


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("tokens", [1, 7, 129])
def test_every_bit_pattern_comes_back(tmp_path: Path, dtype: str, tokens: int) -> None:
    manifest = small_manifest(dtype=dtype, token_ids=tuple(range(tokens)))
    bits = torch.Generator().manual_seed(tokens)
    # Random bits: NaNs with payloads, infinities and denormals among them.
    tensors = {
        name: torch.randint(0, 256, t.view(torch.uint8).shape, generator=bits, dtype=torch.uint8)
        .view(t.dtype)
        .view(t.shape)
        for name, t in small_tensors(manifest).items()
    }
    path = tmp_path / "acme.relay"
    size = write(path, manifest, tensors)
    file = SystemKVFile(path)
    file.verify()
    assert size == file.size == path.stat().st_size
    for layer in manifest.layers:
        for name, read in zip(tensor_names(layer.name), file.tensors(layer.name), strict=True):
            assert same_bits(read, tensors[name])


def test_the_manifest_comes_back_with_a_checksum_for_every_tensor(tmp_path: Path) -> None:
    written = small_manifest(quantization="fp8", tokenizer=None, text='"\\\n\0\u2028\U0001f600')
    tensors = small_tensors(written)
    path = tmp_path / "acme.relay"
    write(path, written, tensors)
    read = SystemKVFile(path).manifest
    expected = {
        name: blake3.blake3(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    assert read == replace(written, checksums=expected)
    assert read.tokens == 7 and read.layers == LAYERS
    assert hash(read.layers) == hash(LAYERS)  # tuples of dataclasses, not JSON's lists


def test_a_layer_has_its_tokens_from_its_first_on(tmp_path: Path) -> None:
    first, second = LAYERS
    path = write_small(tmp_path, layers=(first, replace(second, first_token=6)))
    file = SystemKVFile(path)
    file.verify()
    assert [file.tensors(layer.name)[0].shape for layer in LAYERS] == [(7, 3, 5), (1, 1, 7)]


def test_a_file_of_format_1_is_read(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    layers = [asdict(layer) for layer in LAYERS]
    for layer in layers:
        del layer["first_token"]
    edit_manifest(path, format=1, layers=layers)
    file = SystemKVFile(path)
    file.verify()
    assert file.manifest.layers == LAYERS


def test_any_safetensors_reader_reads_the_file(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    expected = small_tensors(small_manifest())
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {*expected, "seal"}
        assert all(same_bits(file.get_tensor(name), expected[name]) for name in expected)
        assert json.loads(file.metadata()[MANIFEST_KEY])["name"] == "acme"


def test_the_seal_differs_for_other_values_and_for_another_manifest(tmp_path: Path) -> None:
    seals = [
        SystemKVFile(write_small(tmp_path, **changes)).seal
        for changes in ({}, {}, {"seed": 1}, {"created": "2026-01-31T12:00:01+01:00"})
    ]
    assert seals[0] == seals[1]
    assert len(set(seals)) == 3


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_a_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "acme.relay"
    path.write_text("an older one that everybody may read")
    path.chmod(0o666)
    scratch = tmp_path / ".scratch"
    scratch.mkdir()
    manifest = small_manifest()
    before = os.umask(umask)
    try:
        write_file(path, manifest, small_tensors(manifest), scratch)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    SystemKVFile(path).verify()


def test_the_old_file_is_there_until_a_complete_new_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small(tmp_path)
    old = path.read_bytes()
    seen = []
    really = os.replace

    def look_then_replace(source: Path, target: Path) -> None:
        assert target == path and path.read_bytes() == old
        SystemKVFile(source).verify()
        assert stat.S_IMODE(os.stat(source).st_mode) == 0o600
        assert os.path.dirname(source) == str(tmp_path / ".scratch")
        seen.append(source)
        really(source, target)

    monkeypatch.setattr(os, "replace", look_then_replace)
    write_small(tmp_path, seed=1)
    assert len(seen) == 1
    assert path.read_bytes() != old
    SystemKVFile(path).verify()
    assert files_in(tmp_path) == ["acme.relay"] and files_in(tmp_path / ".scratch") == []


def test_the_old_file_survives_a_rename_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small(tmp_path)
    old = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no such luck"):
        write_small(tmp_path, seed=1)
    assert path.read_bytes() == old
    assert files_in(tmp_path) == ["acme.relay"]  # what is left lies in the scratch folder
    monkeypatch.undo()
    write_small(tmp_path, seed=1)  # and is in nobody's way
    SystemKVFile(path).verify()


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_old_file_survives_a_full_disk(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    old = path.read_bytes()
    with pytest.raises(OSError, match=rf"^{path}: .*File too large"), largest_file(4096):
        write_small(tmp_path, token_ids=tuple(range(1000)))
    assert path.read_bytes() == old and files_in(tmp_path) == ["acme.relay"]


@pytest.mark.parametrize("change", ["missing", "a layer more", "a name more", "none"])
def test_tensors_other_than_the_manifests_are_not_written(tmp_path: Path, change: str) -> None:
    path = write_small(tmp_path)
    old = path.read_bytes()
    manifest = small_manifest()
    tensors = small_tensors(manifest, seed=1)
    odd = f"{NAME}.k"
    if change == "missing":
        del tensors[odd]
    elif change == "none":
        tensors.clear()
    else:
        odd = f"{NAME}1.k" if change == "a layer more" else "seal"
        tensors[odd] = torch.zeros(7, 3, 5, dtype=torch.bfloat16)
    with pytest.raises(SystemKVError) as caught:
        write(path, manifest, tensors)
    assert str(caught.value) == (
        f"{path}: tensor {odd} is missing, or is of no layer of the manifest"
    )
    assert path.read_bytes() == old and files_in(tmp_path / ".scratch") == []


# How a tensor [7, 3, 5] of bfloat16 is changed, and what the message says of it.
MISFITS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "tokens": (lambda t: t[:-1], "(6, 3, 5) bfloat16"),
    "heads": (lambda t: t[:, :2], "(7, 2, 5) bfloat16"),
    "flat": (lambda t: t.flatten(1), "(7, 15) bfloat16"),
    "by heads": (lambda t: t.transpose(0, 1), "(3, 7, 5) bfloat16"),
    "wider": (lambda t: t.float(), "(7, 3, 5) float32"),
    "as wide": (lambda t: t.half(), "(7, 3, 5) float16"),
    "bytes": (lambda t: t.view(torch.uint8), "(7, 3, 10) uint8"),
}


@pytest.mark.parametrize("change", MISFITS)
def test_tensors_that_do_not_fit_the_manifest_are_not_written(tmp_path: Path, change: str) -> None:
    path = write_small(tmp_path)
    old = path.read_bytes()
    manifest = small_manifest()
    tensors = small_tensors(manifest, seed=1)
    name = f"{NAME}.v"
    changed, found = MISFITS[change]
    tensors[name] = changed(tensors[name])
    with pytest.raises(SystemKVError) as caught:
        write(path, manifest, tensors)
    assert str(caught.value) == f"{path}: tensor {name} must be (7, 3, 5) bfloat16, is {found}"
    assert path.read_bytes() == old and files_in(tmp_path / ".scratch") == []


def test_tensors_need_not_be_dense(tmp_path: Path) -> None:
    manifest = small_manifest()
    dense = small_tensors(manifest)
    keys, values = tensor_names(NAME)
    repeated, _ = tensor_names(LAYERS[1].name)
    row = dense[repeated][:1]
    dense[repeated] = row.repeat(7, 1, 1)
    # Views of one allocation, as in a cache that holds keys beside values.
    both = torch.cat([dense[keys], dense[values]], 2)
    views = {keys: both[..., :5], values: both[..., 5:], repeated: row.expand(7, 1, 7)}
    assert not any(tensor.is_contiguous() for tensor in views.values())
    write(tmp_path / "dense.relay", manifest, dense)
    write(tmp_path / "views.relay", manifest, dense | views)
    assert (tmp_path / "views.relay").read_bytes() == (tmp_path / "dense.relay").read_bytes()


# Opened


def test_opening_reads_the_header_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file of about 1 TB that takes a few kB on the disk: its tensors are a hole.
    layer = Layer(NAME, kv_heads=1 << 20, head_size=1 << 16)
    manifest = small_manifest(layers=(layer,))
    names = tensor_names(layer.name)
    manifest = replace(manifest, checksums=dict.fromkeys(names, "00" * 32))
    shape = [manifest.tokens, layer.kv_heads, layer.head_size]
    nbytes = 2 * manifest.tokens * layer.kv_heads * layer.head_size
    entries: dict[str, Any] = {"__metadata__": {MANIFEST_KEY: manifest.to_json()}}
    for i, name in enumerate(names):
        offsets = [i * nbytes, (i + 1) * nbytes]
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    end = 2 * nbytes
    entries["seal"] = {"dtype": "U8", "shape": [32], "data_offsets": [end, end + 32]}
    header = json.dumps(entries).encode()
    start = struct.pack("<Q", len(header)) + header
    path = tmp_path / "large.relay"
    with path.open("wb") as file:
        file.write(start)
        file.seek(len(start) + end)
        file.write(blake3.blake3(start).digest())
    assert path.stat().st_size > 1e12

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the tensors are not needed")

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(file_module, "checksum", fail)
    with time_limit(20):
        before, faults = bytes_read(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        opened = SystemKVFile(path)
        read = bytes_read() - before
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert opened.size == path.stat().st_size and opened.manifest == manifest
    # Reads are rounded up to Python's buffer or a page, at the header and at the seal.
    assert read <= len(start) + (1 << 20)
    assert faults * resource.getpagesize() < 64 << 20  # nor read through a mapping


def bytes_read() -> int:
    """Bytes that this process has had from ``read`` so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def test_a_file_that_is_truncated_later_does_not_end_the_process(tmp_path: Path) -> None:
    script = f"""
import os, sys
from vllm_relay.system_kv.file import SystemKVFile
keys, values = SystemKVFile(sys.argv[1]).tensors({NAME!r})
os.truncate(sys.argv[1], 0)
print(keys.float().sum() + values.float().sum())
"""
    path = write_small(tmp_path)
    done = subprocess.run([sys.executable, "-c", script, path], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_a_tensor_larger_than_the_memory_is_an_error(tmp_path: Path) -> None:
    file = SystemKVFile(write_small(tmp_path))
    keys, _ = tensor_names(LAYERS[0].name)
    file._shapes[keys] = (2**50, 1, 1)
    with pytest.raises(SystemKVError, match=f"no memory for tensor {keys}$"):
        file.tensors(LAYERS[0].name)


def test_writing_to_a_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    file = SystemKVFile(path)
    file.tensors(NAME)[0].zero_()
    file.verify()
    SystemKVFile(path).verify()


# Changed after it was opened


def test_a_file_that_gets_the_name_later_is_not_read(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    file = SystemKVFile(path)
    expected = [tensor.clone() for tensor in file.tensors(NAME)]
    write_small(tmp_path, seed=1)
    assert SystemKVFile(path).seal != file.seal
    assert all(map(torch.equal, file.tensors(NAME), expected))
    path.unlink()
    assert all(map(torch.equal, file.tensors(NAME), expected))


@pytest.mark.parametrize("by", ["a changed byte", "a shorter one", "a text"])
def test_a_file_changed_in_its_place_after_it_was_opened_is_refused(
    tmp_path: Path, by: str
) -> None:
    path = write_small(tmp_path)
    content = bytearray(path.read_bytes())
    file = SystemKVFile(path)
    if by == "a changed byte":
        values = small_tensors(small_manifest())[f"{NAME}.v"].view(torch.uint8).numpy()
        content[content.index(values)] ^= 1
    elif by == "a shorter one":
        del content[8 + len(split(path)[0]) + 5 :]
    else:
        content = bytearray(b"You are a helpful assistant.")
    with path.open("r+b") as opened:  # the same inode
        opened.truncate(len(content))
        opened.write(content)
    with pytest.raises(SystemKVError) as caught:
        file.tensors(NAME)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_damaged_layer_does_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    content = bytearray(path.read_bytes())
    damaged = f"{LAYERS[1].name}.k"
    at = content.index(small_tensors(small_manifest())[damaged].view(torch.uint8).numpy())
    content[at] ^= 1
    path.write_bytes(content)
    file = SystemKVFile(path)
    assert same_bits(file.tensors(NAME)[0], small_tensors(small_manifest())[f"{NAME}.k"])
    for read in (lambda: file.tensors(LAYERS[1].name), file.verify):
        with pytest.raises(SystemKVError, match=f"^{path}: tensor {damaged} is damaged: checksum"):
            read()


def test_tensors_stay_readable_when_the_file_is_replaced(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    keys, _ = SystemKVFile(path).tensors(NAME)
    write_small(tmp_path, seed=1)
    path.unlink()
    assert same_bits(keys, small_tensors(small_manifest())[f"{NAME}.k"])
