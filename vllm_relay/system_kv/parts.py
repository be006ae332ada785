"""Parts of one prompt's KV, one of each worker of an engine: handed over in files, and joined.

A part is a system-KV file of its worker's layers and KV heads, in a scratch folder beside the
finished files. The first worker takes the others' and writes the file of the whole.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vllm_relay.system_kv.file import SystemKVFile, write_file
from vllm_relay.system_kv.manifest import Layer, Manifest, tensor_names
from vllm_relay.system_kv.scratch import SCRATCH, scratch_folder

# Seconds between two looks for a part.
_INTERVAL = 0.02


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """KV of a layer in one worker: keys and values ``[tokens, kv_heads, head_size]``."""

    layer: Layer
    keys: torch.Tensor
    values: torch.Tensor


def join(
    parts: Iterable[LayerKV], total_kv_heads: int
) -> tuple[dict[str, torch.Tensor], list[Layer]]:
    """KV by tensor name, and the layers, joined over the workers.

    Args:
        parts: in the order of the workers' ranks.
        total_kv_heads: of the model. With more workers than KV heads several hold the same ones.
    """
    held: dict[str, list[LayerKV]] = {}
    for part in parts:
        held.setdefault(part.layer.name, []).append(part)
    tensors, layers = {}, []
    for name, of_layer in held.items():
        heads = of_layer[0].layer.kv_heads * len(of_layer)
        of_layer = of_layer[:: max(1, heads // total_kv_heads)]
        slices = [part.keys for part in of_layer], [part.values for part in of_layer]
        for tensor_name, tensor in zip(tensor_names(name), slices, strict=True):
            tensors[tensor_name] = tensor[0] if len(tensor) == 1 else torch.cat(tensor, 1)
        kv_heads = sum(part.layer.kv_heads for part in of_layer)
        layers.append(replace(of_layer[0].layer, kv_heads=kv_heads))
    return tensors, layers


def hand_over(
    folder: Path,
    name: str,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    ended: Callable[[], bool],
) -> None:
    """Write a part and keep it until it is taken, or ``ended`` is true: nobody wants it."""
    if ended():
        return
    with scratch_folder(folder) as scratch:
        path = scratch / name
        write_file(path, manifest, tensors, scratch, threads=1)
        while path.exists() and not ended():
            time.sleep(_INTERVAL)


def take_over(folder: Path, name: str, ended: Callable[[], bool]) -> SystemKVFile | None:
    """Another worker's part, once it is there; None if ``ended`` is true before.

    Raises SystemKVError if it is damaged.
    """
    while not (found := list(folder.glob(f"{SCRATCH}*/{name}"))):
        if ended():
            return None
        time.sleep(_INTERVAL)
    file = SystemKVFile(found[0])
    found[0].unlink()  # it stays open
    return file
