"""Hostile system-KV files: changed by their structure, sealed again, admitted and written."""

import json
import struct
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import blake3
import torch

from tests.soak.hostile_guards import Guards
from tests.soak.hostile_mutants import changed, damaged, text
from tests.soak.hostile_text import Case, accepted
from tests.unit.backend.cpu_bench import BLOCK, make_bench
from tests.unit.system_kv.files import put_together, small_manifest, small_tensors, write
from vllm_relay.config import CONNECTOR
from vllm_relay.system_kv import admission, file
from vllm_relay.system_kv.file import SystemKVError
from vllm_relay.system_kv.manifest import Identity, Layer, Manifest
from vllm_relay.system_kv.placement import CacheGroup, budget_error, pinned_ids, place
from vllm_relay.system_kv.writer import Writer

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
BLOCKS, VOCABULARY = 8, 500
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
# The second layer has a window of one block.
GROUPS = [
    CacheGroup(block_size=BLOCK, window=window, layers=(name,))
    for name, window in zip(NAMES, (None, BLOCK + 1), strict=True)
]
_ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I64": 8}
_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def serial_checksum(tensor: torch.Tensor, threads: int = 1) -> str:
    """As `file.checksum`, on one thread: blake3's others do not survive a fork."""
    return blake3.blake3(tensor.contiguous().view(torch.uint8).flatten().numpy().data).hexdigest()


def make_case(folder: Path) -> Case:
    """Files opened, admitted, and written into a KV cache between guard pages."""
    mock.patch.object(file, "checksum", serial_checksum).start()
    first, second = (Layer(name, KV_HEADS, HEAD_SIZE) for name in NAMES)
    layers = first, replace(second, first_token=BLOCK // 2)
    base = small_manifest(
        layers=layers,
        token_ids=tuple(range(1, 2 * BLOCK + 7)),
        engine={"vllm": version("vllm"), "device": "cpu"},
    )
    path = folder / "base.relay"
    write(path, base, small_tensors(base))
    content = path.read_bytes()
    engine, path = Engine(base), folder / "mutant.relay"

    def case(rng: Random) -> bool:
        if rng.random() < 0.1:
            path.write_bytes(damaged(rng, content))
        else:
            _mutant(rng, content, path)
        return accepted(partial(engine.load, path), SystemKVError)

    return case


class Engine:
    """What admission and `Writer` see of an engine; its layers' KV caches end at guard pages."""

    def __init__(self, manifest: Manifest) -> None:
        identity = {name: getattr(manifest, name) for name in Identity.__dataclass_fields__}
        known = Identity(**identity)
        mock.patch.object(admission, "identify", lambda *args: known).start()
        self.guards, self.layers = Guards(), {}
        shape = (BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_SIZE)  # a multiple of a page
        self.packed = []
        for name in NAMES:
            bench = make_bench(HEADS, KV_HEADS, HEAD_SIZE, torch.bfloat16, "vec", BLOCKS)
            self.packed.append(bench.plan_by())
            bench.layer.layer_name = name
            bench.layer.kv_cache = Guards().tensor(shape, torch.bfloat16)
            self.layers[name] = bench.layer
        self.config = SimpleNamespace(
            cache_config=SimpleNamespace(
                enable_prefix_caching=True, block_size=BLOCK, calculate_kv_scales=False
            ),
            model_config=SimpleNamespace(
                is_encoder_decoder=False, has_inner_state=False, get_vocab_size=lambda: VOCABULARY
            ),
            speculative_config=None,
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                pipeline_parallel_size=1,
                tensor_parallel_size=1,
                rank=1,  # without a line in the log
            ),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            kv_transfer_config=SimpleNamespace(kv_connector=CONNECTOR),
        )

    def load(self, path: Path) -> None:
        """As at a start, from the settings to the last block. Raises SystemKVError."""
        extra: dict[str, Any] = {"files": [str(path)]}
        self.config.kv_transfer_config.kv_connector_extra_config = extra
        admission.admit(self.config, None)
        files, salts = admission.open_admitted(extra)
        placements = place([file.manifest.token_ids for file in files], GROUPS, salts)
        if error := budget_error(len(pinned_ids(placements)), BLOCKS - 1, 1.0, 0, 0):
            raise SystemKVError(error)
        stock = torch.empty

        def empty(*shape: Any, device: Any = None, dtype: Any = None, **options: Any) -> Any:
            sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            if dtype is None or 0 in sizes:
                return stock(*shape, dtype=dtype, **options)
            return self.guards.tensor(sizes, dtype, align=64)

        try:
            with mock.patch.object(torch, "empty", empty):
                Writer(self.config, files, placements, GROUPS).write()
        finally:
            for packed in self.packed:
                packed.clear()
            self.guards.free()


def _mutant(rng: Random, content: bytes, path: Path) -> None:
    """Write a file with changes of header, manifest and tensors, mostly with the right digests."""
    length = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    manifest = json.loads(header["__metadata__"][file.MANIFEST_KEY])
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        change = rng.choice((_change_manifest, _change_shape, _change_dtype, _change_entry))
        manifest, header = change(rng, manifest, header)
    if rng.random() < 0.1:
        header = changed(rng, header)
    body = _sized(rng, header, body)
    if rng.random() < 0.8:
        _put_checksums(manifest, header, body)
    with suppress(TypeError, KeyError):  # the header or its metadata are something else
        header["__metadata__"][file.MANIFEST_KEY] = text(rng, manifest).decode(errors="replace")
    raw = text(rng, header)
    raw += b" " * (-len(raw) % 8)
    try:
        put_together(path, raw, body, reseal=rng.random() < 0.9)
    except Exception:  # there is no place for a seal
        put_together(path, raw, body)
    if rng.random() < 0.05:
        path.write_bytes(damaged(rng, path.read_bytes()))


def _change_manifest(rng: Random, manifest: Any, header: Any) -> tuple[Any, Any]:
    return changed(rng, manifest), header


def _entries(header: Any) -> list[Any]:
    entries = list(header.values()) if isinstance(header, dict) else []
    return [x for x in entries if isinstance(x, dict) and "data_offsets" in x]


def _change_shape(rng: Random, manifest: Any, header: Any) -> tuple[Any, Any]:
    """Tokens, heads, head size or first token, in the manifest, the header or both."""
    tokens = rng.choice((1, BLOCK - 1, BLOCK, 2 * BLOCK, 5 * BLOCK, 7 * BLOCK, 9 * BLOCK))
    others = ((2, 64), (1, 64), (4, 16), (1, 32), (2, 31))
    firsts = [rng.choice((0, 0, 0, 1, BLOCK, 2 * BLOCK, tokens - 1, tokens)) for _ in range(2)]
    heads, size = rng.choice((*[(KV_HEADS, HEAD_SIZE)] * 5, *others))
    if rng.random() < 0.9:
        with suppress(TypeError, KeyError, AttributeError):
            manifest["token_ids"] = [rng.randrange(VOCABULARY) for _ in range(tokens)]
            for layer, first in zip(manifest["layers"], firsts, strict=False):
                layer |= {"kv_heads": heads, "head_size": size, "first_token": first}
    if rng.random() < 0.9:
        names = [x for x, entry in header.items() if entry in _entries(header)]
        for name in names[: rng.choice((1, 9, 9, 9))]:
            if header[name].get("dtype") != "U8":
                first = firsts[str(name).startswith(NAMES[1])]
                header[name]["shape"] = [tokens - first, heads, size]
        _lay_out(header)
    return manifest, header


def _change_dtype(rng: Random, manifest: Any, header: Any) -> tuple[Any, Any]:
    """The manifest's, the header's, or one tensor's."""
    if rng.random() < 0.3 and isinstance(manifest, dict):
        manifest["dtype"] = rng.choice(_DTYPES)
    dtype = rng.choice(list(_ITEM))
    entries = [entry for entry in _entries(header) if entry.get("dtype") != "U8"]
    for entry in rng.choice((entries, entries[:1], entries[-1:])):
        entry["dtype"] = dtype
    if rng.random() < 0.8:
        _lay_out(header)
    return manifest, header


def _change_entry(rng: Random, manifest: Any, header: Any) -> tuple[Any, Any]:
    """One entry of the header; offsets that overlap, run backwards or leave the file."""
    entries = _entries(header)
    if not entries:
        return manifest, header
    entry, other = rng.choice(entries), rng.choice(entries)
    end = 10_000
    match rng.randrange(6):
        case 0:
            entry["data_offsets"] = other["data_offsets"]
        case 1:
            entry["data_offsets"], other["data_offsets"] = (
                other["data_offsets"], entry["data_offsets"],
            )  # fmt: skip
        case 2:
            entry["data_offsets"] = [rng.randint(-end, end), rng.randint(-end, end)]
        case 3:
            moved = rng.choice((-64, -1, 1, 64, 2**40, 2**63))
            with suppress(TypeError):
                entry["data_offsets"] = [x + moved for x in entry["data_offsets"]]
        case 4:
            header[rng.choice((*NAMES, "x", "\n"))] = dict(entry)
        case _:
            name = rng.choice(list(header))
            header[name] = changed(rng, header[name])
    return manifest, header


def _lay_out(header: Any) -> None:
    """Offsets that follow from shapes and dtypes."""
    at = 0
    for entry in _entries(header):
        with suppress(TypeError, KeyError, ValueError):
            size = int(torch.Size(entry["shape"]).numel()) * _ITEM[entry["dtype"]]
            entry["data_offsets"] = [at, at + size]
            at += size


def _sized(rng: Random, header: Any, body: bytes) -> bytes:
    """The body, mostly as long as the header says."""
    ends = [max(x["data_offsets"]) for x in _entries(header) if _are_offsets(x["data_offsets"])]
    wanted = max(ends, default=len(body))
    if wanted > 1 << 22 or rng.random() < 0.1:
        return body
    return (body * (1 + wanted // len(body)))[: max(0, wanted)]


def _are_offsets(given: Any) -> bool:
    return isinstance(given, list) and len(given) > 1 and all(type(x) is int for x in given)


def _put_checksums(manifest: Any, header: Any, body: bytes) -> None:
    if not isinstance(manifest, dict) or not isinstance(header, dict):
        return
    digests = {}
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if name != file.SEAL and _are_offsets(offsets):
            digests[name] = blake3.blake3(body[slice(*offsets[:2])]).hexdigest()
    manifest["checksums"] = digests
