"""The worker's side: from files into this worker's KV blocks, through the engine's own write path.

The engine's ``do_kv_cache_update`` knows its block layout, so nothing here does: tensors of a file
are cut to this worker's KV heads and given to it, all tokens of a layer in one call.
"""

import time
from collections.abc import Sequence
from typing import Any

import blake3
import torch

from vllm_relay import metrics, plugin
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.pins import place

# Elements looked at per parameter: enough to see any training step or merged adapter.
_SAMPLE = 1 << 16
# A digest, and objects that are compared by identity.
_Fingerprint = tuple[bytes, list[Any]]


class Writer:
    """Writes system KVs into the KV cache of one worker.

    Args:
        vllm_config: vLLM's VllmConfig. files: what to load, in order.
        block_size: tokens per block. layers: names of the layers of the KV cache group, this
            worker's only.
    """

    def __init__(
        self,
        vllm_config: Any,
        files: Sequence[SystemKVFile],
        block_size: int,
        layers: Sequence[str],
    ) -> None:
        self._vllm_config = vllm_config
        self._files = files
        self._block_size = block_size
        self._layers = layers
        self._weights: _Fingerprint | None = None

    def write_at_start(self) -> None:
        """Write the blocks the first time, and note the weights that the files were compared with.

        Raises:
            SystemKVError: as `write`.
        """
        if self._weights is None:
            self.write()
            self._weights = _fingerprint()

    def write(self) -> None:
        """Write every file's full blocks; the ids are those of `place`.

        Raises:
            SystemKVError: a file is damaged, or lacks a layer of this model.
        """
        placements = place([f.manifest.token_ids for f in self._files], self._block_size)
        started, count = time.monotonic(), 0
        for file, placement in zip(self._files, placements, strict=True):
            begin = placement.shared * self._block_size
            end = len(placement.block_ids) * self._block_size
            if begin < end:
                slots = _slots(placement.block_ids[placement.shared :], self._block_size)
                count += self._write_file(file, begin, end, slots)
        seconds = time.monotonic() - started
        for placement in placements:
            for name in self._layers:
                layer, cache = self._layer(name)
                if keep := getattr(layer.impl, "keep", None):
                    keep(layer, cache, placement.block_ids)
        if self._files and self._vllm_config.parallel_config.rank == 0:
            metrics.logger.info(
                "relay: wrote %d system KV%s into the KV cache: %.1f MB in %.3f s, %.2f GB/s, "
                "checksums included",
                len(self._files),
                "" if len(self._files) == 1 else "s",
                count / 1e6,
                seconds,
                count / 1e9 / max(seconds, 1e-9),
            )

    def _layer(self, name: str) -> tuple[Any, torch.Tensor]:
        """A layer of this worker's model, and its KV blocks."""
        layer = self._vllm_config.compilation_config.static_forward_context[name]
        cache = layer.kv_cache
        return layer, cache[0] if isinstance(cache, (list, tuple)) else cache

    def _write_file(self, file: SystemKVFile, begin: int, end: int, slots: torch.Tensor) -> int:
        """Write tokens ``begin`` to ``end`` of a file; returns the bytes written."""
        described = {layer.name: layer for layer in file.manifest.layers}
        ours = set(self._layers)
        if missing := sorted(ours - described.keys()):
            raise SystemKVError(f"{file.path}: has no KV for layer {missing[0]} of this model")
        parallel = self._vllm_config.parallel_config
        extra = described.keys() - ours
        if extra and parallel.pipeline_parallel_size == 1:
            raise SystemKVError(f"{file.path}: has KV for {min(extra)}, which this model lacks")
        written = 0
        for name in self._layers:
            (layer, cache), wanted = self._layer(name), described[name]
            heads = layer.impl.num_kv_heads
            first = _first_head(wanted.kv_heads, heads, parallel.tensor_parallel_size)
            _check_shape(file, layer, wanted)
            slots = slots.to(cache.device)
            keys, values = (
                tensor[begin:end, first : first + heads].to(cache.device).contiguous()
                for tensor in file.tensors(name)
            )
            layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
            written += keys.nbytes + values.nbytes
        return written

    def forget(self) -> None:
        """The blocks may hold something else from now on."""
        for name in self._layers:
            if forget := getattr(self._layer(name)[0].impl, "forget", None):
                forget()

    def rewrite(self) -> str | None:
        """Write again after the cache was reset.

        Returns:
            None, or why the system KVs must not be used any more.
        """
        self.forget()
        if _fingerprint() != self._weights:
            return "the model's weights were changed"
        try:
            self.write()
        except (SystemKVError, OSError) as error:
            return str(error)
        return None


def _slots(block_ids: Sequence[int], block_size: int) -> torch.Tensor:
    """Slots of all tokens of blocks, int64."""
    offsets = torch.arange(block_size)
    return (torch.tensor(block_ids).unsqueeze(1) * block_size + offsets).flatten()


def _first_head(total: int, heads: int, tensor_parallel_size: int) -> int:
    """The first KV head of this worker, as vLLM's QKVParallelLinear deals them out.

    With more workers than KV heads, neighbouring workers hold the same head.

    Raises:
        SystemKVError: the file's heads are not this model's.
    """
    replicas, rest = divmod(heads * tensor_parallel_size, total)
    if rest or (replicas > 1 and heads != 1):
        raise SystemKVError(
            f"the file has {total} KV heads; {tensor_parallel_size} workers with {heads} each "
            "are another model"
        )
    if tensor_parallel_size == 1:
        return 0
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank()) // replicas * heads


def _check_shape(file: SystemKVFile, layer: Any, wanted: Any) -> None:
    ours = (layer.impl.head_size, float(layer._k_scale_float), float(layer._v_scale_float))
    theirs = (wanted.head_size, wanted.k_scale, wanted.v_scale)
    if ours != theirs:
        raise SystemKVError(
            f"{file.path}: layer {wanted.name} has head size, k scale, v scale {theirs}, "
            f"in this model {ours}"
        )


def _fingerprint() -> _Fingerprint:
    """What changes when the weights of this worker's model are changed.

    It tells a reset of the cache from a reset after new weights were loaded; it is sampled, and no
    defence against intent. vLLM's CPU engine keeps the weights of most linear layers packed inside
    a function, ``cpu_linear``, and their parameters empty; new weights come with a new function.
    """
    model = plugin.worker().model_runner.get_model()
    total = blake3.blake3()
    for parameter in model.parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].contiguous()
        total.update(sample.view(torch.uint8).cpu().numpy().data)
    return total.digest(), [vars(module).get("cpu_linear") for module in model.modules()]
