"""What is damaged, edited or something else is refused, in one line that names the file."""

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import blake3
import pytest
import safetensors
import torch
from safetensors.torch import save_file

from tests.unit.system_kv.files import (
    LAYERS,
    edit_header,
    edit_manifest,
    put_together,
    refusal,
    small_manifest,
    split,
    time_limit,
    write_small,
)
from vllm_relay.system_kv.file import MANIFEST_KEY, SystemKVError, SystemKVFile

ROOT = Path(__file__).parents[3]
NAME = LAYERS[0].name


# Damaged


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    content = path.read_bytes()
    end = 8 + len(split(path)[0])
    lengths = {0, 1, 7, 8, 9, 10, end - 1, end, end + 1, len(content) - 33, len(content) - 32}
    lengths |= {len(content) - 31, len(content) - 1}
    lengths |= set(random.Random(0).sample(range(len(content)), 50))
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        with pytest.raises(SystemKVError):
            SystemKVFile(path)  # not only when its tensors are read
        assert ("is truncated" if length >= 8 else "is not a system-KV file") in refusal(path)


def test_a_file_with_bytes_after_its_end_is_refused(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    content = path.read_bytes()
    for more in (b"\0", b"\n", bytes(32), content):
        path.write_bytes(content + more)
        assert refusal(path) == (
            f"has bytes after its end: {len(content) + len(more):,} bytes of {len(content):,}"
        )


def test_any_changed_byte_is_seen(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    # safetensors fills the header up to a multiple of 8: without filling there is none to change
    for digits in range(8):
        path = write_small(tmp_path, model="/models/small" + "0" * digits)
        if split(path)[0].endswith(b"   "):
            break
    content = path.read_bytes()
    header = split(path)[0]
    begin, end = 8, 8 + len(header)
    manifest = content.index(b"__metadata__")
    entries = json.loads(header)
    places = {
        "anywhere": range(len(content)),
        "length of the header": range(begin),
        "header": range(begin, end),
        "manifest": range(manifest, manifest + len(entries["__metadata__"][MANIFEST_KEY])),
        "filling": range(begin + len(header.rstrip()), end),
        **{
            name: range(end + entry["data_offsets"][0], end + entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__"
        },
    }
    assert len(places["filling"]) >= 3 and len(places["seal"]) == 32
    chance = random.Random(0)
    for where, positions in places.items():
        for _ in range(200 if where == "anywhere" else 40):
            changed = bytearray(content)
            at = chance.choice(positions)
            changed[at] ^= chance.randrange(1, 256)
            path.write_bytes(changed)
            message = refusal(path)
            if where in entries and where != "seal":
                assert message == f"tensor {where} is damaged: checksum differs"
            if where == "seal":
                assert message.startswith("the manifest is not the one that was written with it")
    path.write_bytes(content)
    SystemKVFile(path).verify()  # it was the changes


def test_any_flipped_bit_of_the_header_is_seen_on_opening(tmp_path: Path) -> None:
    path = write_small(tmp_path, layers=LAYERS[:1], token_ids=(1,))
    content = path.read_bytes()
    end = 8 + len(split(path)[0])
    for at in range(end):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            try:
                SystemKVFile(path)
            except SystemKVError as error:
                assert str(error).startswith(f"{path}: ") and len(str(error).splitlines()) == 1
            else:
                pytest.fail(f"bit {bit} of byte {at} flipped, and it opens")


# Edited

EDITS = {
    "same length": (r"\"name\": \"acme\"", r"\"name\": \"acmf\""),
    "longer": (r"\"name\": \"acme\"", r"\"name\": \"acme corporation\""),
    "shorter": (r"\"name\": \"acme\"", r"\"name\": \"a\""),
    "tokens": ("[1, 9690, 198,", "[1, 9690, 199,"),
    "weights": ("a1" * 32, "a1" * 31 + "a2"),
    "dtype": (r"\"dtype\": \"bfloat16\"", r"\"dtype\": \"float16\""),
    "scale": (r"\"k_scale\": 0.5", r"\"k_scale\": 0.25"),
    "white space": (r"\"name\": \"acme\"", r"\"name\":  \"acme\""),
    "tensor's dtype": (
        f'"{NAME}.k":{{"dtype":"BF16"',
        f'"{NAME}.k":{{"dtype":"F16"',
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_header_is_refused(tmp_path: Path, edit: str) -> None:
    path = write_small(tmp_path)
    edit_header(path, *EDITS[edit])
    with safetensors.safe_open(path, framework="pt") as file:
        assert "seal" in file.keys()  # noqa: SIM118 - still a valid safetensors file
    assert refusal(path) == (
        "the manifest is not the one that was written with it (its checksum differs): the file is "
        "damaged or was edited"
    )


@pytest.mark.parametrize("edit", ["same length", "longer", "shorter"])
def test_it_is_the_seal_that_guards_the_header(tmp_path: Path, edit: str) -> None:
    path = write_small(tmp_path)
    edit_header(path, *EDITS[edit], reseal=True)
    file = SystemKVFile(path)
    file.verify()
    assert file.manifest.name in ("acmf", "acme corporation", "a")


def test_a_changed_tensor_with_its_new_checksum_is_refused(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    old = SystemKVFile(path).manifest.checksums[f"{NAME}.k"]
    header, body = split(path)
    begin, end = json.loads(header)[f"{NAME}.k"]["data_offsets"]
    changed = bytes([body[begin] ^ 1]) + body[begin + 1 : end]
    put_together(path, header, body[:begin] + changed + body[end:])
    assert refusal(path) == f"tensor {NAME}.k is damaged: checksum differs"
    edit_header(path, old, blake3.blake3(changed).hexdigest())
    assert "the manifest is not the one that was written with it" in refusal(path)
    # The checksum is the right one: under a new seal nothing is left to refuse.
    put_together(path, *split(path), reseal=True)
    SystemKVFile(path).verify()


def test_two_files_cannot_be_mixed(tmp_path: Path) -> None:
    one, two = write_small(tmp_path), write_small(tmp_path, name="acmf", seed=1)
    put_together(tmp_path / "mixed.relay", split(one)[0], split(two)[1])
    assert "the manifest is not the one" in refusal(tmp_path / "mixed.relay")
    seal = split(one)[1][-32:]
    put_together(tmp_path / "mixed.relay", split(one)[0], split(two)[1][:-32] + seal)
    assert "checksum differs" in refusal(tmp_path / "mixed.relay")


@pytest.mark.parametrize("reseal", [True, False])
def test_a_newer_format_is_named_even_when_it_is_sealed_in_another_way(
    tmp_path: Path, reseal: bool
) -> None:
    path = write_small(tmp_path)
    edit_manifest(path, format=3, name=..., reseal=reseal)  # and has other fields
    assert refusal(path) == (
        "has format 3; this version of vllm-relay reads 1 and 2: install a newer one, or build the "
        "file anew"
    )


@pytest.mark.parametrize("written", [0, -1, "1", "2", None, [1], {"major": 1}])
def test_what_is_no_known_format_is_refused(tmp_path: Path, written: Any) -> None:
    path = write_small(tmp_path)
    edit_manifest(path, format=written)
    assert refusal(path) == f"has format {written!r}; this version of vllm-relay reads 1 and 2"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": ...}, "weights is missing"),
        ({"token_ids": 7}, "token_ids must be a valid tuple, got 7"),
        ({"token_ids": [1, "two"]}, r"token_ids\[1\] must be a valid integer, got 'two'"),
        ({"token_ids": [1, 2, 3]}, r"tensor .*\.k has the shape \[7, 3, 5\]"),
        ({"layers": None}, "layers must be a valid tuple, got None"),
        ({"layers": [{"name": "a"}]}, r"layers\[0\].kv_heads is missing"),
        ({"token_ids": [1, 2.0]}, r"token_ids\[1\] must be a valid integer, got 2.0"),
        (
            {"layers": [asdict(LAYERS[0]) | {"head_size": "5"}]},
            r"\.head_size must be a valid integer",
        ),
        ({"dtype": None}, "dtype must be 'float32', .*, got None"),
        ({"dtype": "float32"}, "tensor .*k has the dtype BF16"),
        ({"dtype": "int64"}, "dtype must be 'float32', .*, got 'int64'"),
        ({"token_ids": [1, 2, -3]}, r"token_ids\[2\] must be >= 0, got -3"),
        ({"token_ids": [2**40] * 7}, r"token_ids\[0\] must be less than 2147483648"),
        ({"name": ["acme"]}, r"name must be a valid string, got \['acme'\]"),
        ({"name": "acme\nrelay: all is well"}, "name must match pattern"),
        ({"name": "\x1b[2J"}, "name must match pattern"),
        ({"name": "a" * 5000}, "name must have at most 4096 characters"),
        ({"kind": "prompt"}, "kind must be 'system-prompt', 'text' or 'token-ids'"),
        ({"created": "yesterday"}, "Invalid isoformat string: 'yesterday'"),
        ({"created": "2026-01-31T12:00:00"}, "created has no time zone"),
        ({"engine": {"vllm": "0.32\n"}}, "engine.vllm must match pattern"),
        ({"layers": [asdict(LAYERS[0]) | {"k_scale": -1.0}]}, r"k_scale must be greater than 0"),
        ({"layers": [asdict(LAYERS[0]) | {"k_scale": float("nan")}]}, "k_scale must be"),
        ({"layers": [asdict(LAYERS[0]) | {"first_token": -1}]}, "first_token must be >= 0"),
        (
            {"layers": [asdict(LAYERS[0]) | {"first_token": 0.5}]},
            "must be a valid integer, got 0.5",
        ),
        ({"layers": [asdict(LAYERS[0]) | {"first_token": 7}]}, "attn begins at token 7 of 7"),
        ({"layers": [asdict(LAYERS[0]) | {"first_token": 2}]}, "does not name the tensors"),
        ({"layers": [asdict(x) | {"first_token": 2} for x in LAYERS]}, r"the shape \[7, 3, 5\]"),
        ({"engine": {"vllm": 1}}, r"engine\.vllm must be a valid string, got 1"),
        ({"checksums": []}, "checksums must be a valid"),
        ({"layers": []}, "does not name the tensors in the file"),
        ({"layers": [asdict(LAYERS[0])]}, "does not name the tensors in the file"),
        ({"checksums": {}}, "does not name the tensors in the file"),
    ],
)
def test_a_sealed_manifest_that_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = write_small(tmp_path)
    edit_manifest(path, **changes)
    with pytest.raises(SystemKVError, match=f"^{path}: the manifest is malformed: .*{reason}"):
        SystemKVFile(path)
    refusal(path)


def test_a_file_without_a_format_is_no_system_kv_file(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    edit_manifest(path, format=...)
    assert refusal(path) == "is a safetensors file, but not a system-KV file"


# Something else


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "acme.relay") == "No such file or directory"
    assert refusal(tmp_path) == "is a directory, not a system-KV file"
    (tmp_path / "dangling").symlink_to(tmp_path / "acme.relay")
    assert refusal(tmp_path / "dangling") == "No such file or directory"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "symbolic links" in refusal(tmp_path / "loop")


def test_a_link_to_a_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    link = tmp_path / "link.relay"
    link.symlink_to(write_small(tmp_path))
    SystemKVFile(str(link)).verify()


def test_a_file_that_may_not_be_read_is_named() -> None:
    script = """
import os, sys
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
if os.geteuid() == 0:
    os.seteuid(65534)  # root may read everything, this user may not
try:
    SystemKVFile(sys.argv[1])
except SystemKVError as error:
    print(error)
"""
    # Not in tmp_path: there the folders around it are closed to other users, too.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = write_small(Path(folder))
        path.chmod(0)
        done = subprocess.run(
            [sys.executable, "-c", script, path],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, f"{path}: Permission denied\n"), done.stderr


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with time_limit(10):
        assert refusal(pipe) == "is not a regular file, not a system-KV file"
        assert refusal(Path("/dev/zero")) == "is not a regular file, not a system-KV file"


def test_safetensors_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weight, seal = {"weight": torch.ones(3)}, {"seal": torch.zeros(32, dtype=torch.uint8)}
    for tensors, metadata in (
        (weight, None),
        (weight, {"format": "pt"}),
        (weight, {MANIFEST_KEY: small_manifest().to_json()}),
        (weight | seal, {"format": "pt"}),
        (weight | seal, {MANIFEST_KEY: "no JSON"}),
        (weight | seal, {MANIFEST_KEY: "[]"}),
        (weight | seal, {MANIFEST_KEY: "null"}),
        (weight | seal, {MANIFEST_KEY: '"format"'}),
        (weight | {"seal": torch.zeros(31, dtype=torch.uint8)}, {"format": "pt"}),
    ):
        save_file(tensors, path, metadata=metadata)
        assert "not a system-KV file" in refusal(path) or "header is damaged" in refusal(path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x06\0\0\0",
        b"You are a helpful assistant.\n" * 100,
        bytes(4096),
        b"\xff" * 4096,
        struct.pack("<Q", 2**63) + b"{}" * 100,
        struct.pack("<Q", 2**64 - 1) + b"{}" * 100,
        struct.pack("<Q", 100_000_001) + b"{}" * 100,
        struct.pack("<Q", 100_000_000) + b"{}" * 100,
        struct.pack("<Q", 1) + b"{",
        *(
            struct.pack("<Q", len(header)) + header + bytes(64)
            for header in (
                b"{}",
                b"[]",
                b"17",
                b'"__metadata__"',
                b"null",
                b"{ not JSON }",
                b'{"__metadata__":{}}',
                b'{"__metadata__":{},"seal":{}}',
                b'{"__metadata__":{},"seal":[]}',
                b'{"__metadata__":{},"seal":{"data_offsets":[]}}',
                b'{"__metadata__":{},"seal":{"data_offsets":[0,32,64]}}',
                b'{"__metadata__":{},"seal":{"data_offsets":{"a":0}}}',
                b'{"__metadata__":{},"seal":{"data_offsets":[1,64]}}',
                b'{"__metadata__":{},"seal":{"data_offsets":[-32,0]},"a":{"data_offsets":[0,64]}}',
                b'{"__metadata__":null,"seal":{"data_offsets":[32,64]}}',
                b'{"__metadata__":[],"seal":{"data_offsets":[32,64]}}',
                b'{"__metadata__":{"a":"\xff"},"seal":{"data_offsets":[32,64]}}',
                b'{"__metadata__":{},"seal":{"data_offsets":[32,' + b"9" * 5000 + b"]}}",
                b"[" * 200_000,
                b'{"a":' * 200_000,
                b'{"__metadata__":{},"seal":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            )
        ),
    ],
    ids=range(30),
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "acme.relay"
    path.write_bytes(content)
    message = refusal(path)
    assert len(message) < 200
    # beyond safetensors' limit: nothing that could have been cut off
    if struct.unpack("<Q", content[:8])[0] > 100_000_000:
        assert message == "is not a system-KV file"


def test_a_deeply_nested_manifest_is_refused(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    header, body = split(path)
    parsed = json.loads(header)
    parsed["__metadata__"][MANIFEST_KEY] = "[" * 200_000
    put_together(path, json.dumps(parsed).encode(), body, reseal=True)
    assert refusal(path) == "is a safetensors file, but not a system-KV file"


@pytest.mark.parametrize(
    "place",
    [
        lambda begin, end: [str(begin), end],
        lambda begin, end: [None, end],
        lambda begin, end: [[begin], end],
        lambda begin, end: [float(begin), end],
        lambda begin, end: [begin, float("inf")],
    ],
    ids=["text", "null", "list", "float", "infinity"],
)
def test_a_seal_whose_place_is_no_whole_number_is_refused(
    tmp_path: Path, place: Callable[[int, int], list[Any]]
) -> None:
    path = write_small(tmp_path)
    header, body = split(path)
    parsed = json.loads(header)
    parsed["seal"]["data_offsets"] = place(*parsed["seal"]["data_offsets"])
    put_together(path, json.dumps(parsed).encode(), body)
    assert refusal(path) == "is not a system-KV file, or its header is damaged"
