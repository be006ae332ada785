"""Parts of one prompt's KV, one of each worker of an engine: handed over in files, and joined.

A part is a system-KV file of its worker's layers and KV heads, in a scratch folder beside the
finished files. The first worker takes the others' and writes the file of the whole.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from vllm_relay.system_kv.file import SystemKVError, SystemKVFile, write_file
from vllm_relay.system_kv.manifest import Layer, Manifest, tensor_names
from vllm_relay.system_kv.scratch import SCRATCH, scratch_folder

# Seconds that one worker waits for another.
_PATIENCE = 60.0


def join(
    parts: Iterable[tuple[Layer, tuple[torch.Tensor, torch.Tensor]]], total_kv_heads: int
) -> tuple[dict[str, torch.Tensor], list[Layer]]:
    """KV by tensor name, and the layers, joined over the workers.

    Args:
        parts: layers with their keys and values ``[tokens, kv_heads, head_size]``, in the order of
            the workers' ranks.
        total_kv_heads: of the model. With more workers than KV heads several hold the same ones.
    """
    held: dict[str, list[tuple[Layer, tuple[torch.Tensor, torch.Tensor]]]] = {}
    for layer, pair in parts:
        held.setdefault(layer.name, []).append((layer, pair))
    tensors, layers = {}, []
    for name, of_layer in held.items():
        heads = of_layer[0][0].kv_heads * len(of_layer)
        of_layer = of_layer[:: max(1, heads // total_kv_heads)]
        slices = zip(*(pair for _, pair in of_layer), strict=True)
        for tensor_name, tensor in zip(tensor_names(name), slices, strict=True):
            tensors[tensor_name] = tensor[0] if len(tensor) == 1 else torch.cat(tensor, 1)
        kv_heads = sum(layer.kv_heads for layer, _ in of_layer)
        layers.append(replace(of_layer[0][0], kv_heads=kv_heads))
    return tensors, layers


def hand_over(
    folder: Path,
    name: str,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    ended: Callable[[], bool],
) -> None:
    """Write a part and keep it until it is taken, or ``ended`` is true: nobody wants it."""
    with scratch_folder(folder) as scratch:
        path = scratch / name
        write_file(path, manifest, tensors, scratch, threads=1)
        _wait(lambda: not path.exists() or ended())


def take_over(folder: Path, name: str, ended: Callable[[], bool]) -> SystemKVFile | None:
    """Another worker's part, once it is there; None if ``ended`` is true before.

    Raises SystemKVError if the worker does not write it, or it is damaged.
    """

    def find() -> Path | None:
        return next(folder.glob(f"{SCRATCH}*/{name}"), None)

    if not _wait(lambda: find() is not None or ended()):
        raise SystemKVError(
            f"worker {name.rpartition('-')[2]} has not written its part into {folder} in "
            f"{_PATIENCE:.0f} s"
        )
    path = find()
    if path is None:
        return None
    file = SystemKVFile(path)
    path.unlink()  # it stays open
    return file


def _wait(condition: Callable[[], bool]) -> bool:
    """Wait in a thread; False if the condition is not met, or this process ends."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() >= deadline or not threading.main_thread().is_alive():
            return False
        time.sleep(0.02)
    return True
