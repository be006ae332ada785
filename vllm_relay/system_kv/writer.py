"""The worker's side: files are written into this worker's KV blocks.

Tensors are cut to this worker's KV heads and given to the engine's ``do_kv_cache_update``, all
tokens of a layer in one call; so nothing here knows the block layout.
"""

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import blake3
import torch

from vllm_relay import compat, metrics
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.manifest import Layer
from vllm_relay.system_kv.placement import CacheGroup, Placement, alignment

# A parameter's bytes in rows; its 8-byte words are added up by row and by column.
_ROW_BYTES = 1 << 15
# A digest, and references to objects.
_Fingerprint = tuple[bytes, list[weakref.ref[Any] | None]]
_UNREADABLE: _Fingerprint = b"", []
_CHANGED = "the model's weights were changed"


class Writer:
    """Writes system KVs into the KV cache of one worker; ``groups``: its layers.

    ``placements``: each file's blocks, by group. ``warm``: remembered files, and their blocks in
    the only group. ``warm_written``: seal and blocks of those that were written.
    """

    def __init__(
        self,
        vllm_config: Any,
        files: Sequence[SystemKVFile],
        placements: Sequence[tuple[Placement, ...]],
        groups: Sequence[CacheGroup],
        warm: Sequence[tuple[SystemKVFile, Placement]] = (),
    ) -> None:
        self._vllm_config = vllm_config
        self._files, self._warm = files, warm
        self.warm_written: frozenset[tuple[str, Placement]] = frozenset()
        self._placements = placements
        self._groups = groups
        self._layers = [name for group in groups for name in group.layers]
        self._weights: _Fingerprint | None = None

    def write_at_start(self, remember: bool) -> None:
        """Write the blocks the first time, and note the weights that they were computed with.

        ``remember``: note the weights without any file, too.
        """
        if (self._files or remember) and self._weights is None:
            self.write()
            self.write_warm()
            try:
                self._weights = _fingerprint()
            except Exception as error:  # only resets need it, which then release the blocks
                metrics.say_once(f"weights cannot be compared after a reset: {error}")
                self._weights = _UNREADABLE

    def write(self) -> None:
        """Write every file's blocks. Raises SystemKVError for one that is damaged or too short."""
        started, count = time.monotonic(), 0
        for file, placed in zip(self._files, self._placements, strict=True):
            described = self._described(file)
            for group, placement in zip(self._groups, placed, strict=True):
                if placement.shared < len(placement.block_ids):
                    count += self._write_group(file, described, group, placement)
        seconds = time.monotonic() - started
        for placed in self._placements:
            for group, placement in zip(self._groups, placed, strict=True):
                # Under a window segments are read in place: requests soon see another part.
                for layer in map(self._layer, group.layers if group.window is None else ()):
                    if keep := getattr(layer.impl, "keep", None):
                        keep(layer, layer.kv_cache, placement.block_ids)
        if self._files and self._vllm_config.parallel_config.rank == 0:
            metrics.logger.log(
                logging.INFO if self._weights is None else logging.DEBUG,  # resets can be many
                "relay: wrote %d system KV%s into the KV cache: %.1f MB in %.3f s, %.2f GB/s, "
                "checksums included",
                len(self._files),
                "" if len(self._files) == 1 else "s",
                count / 1e6,
                seconds,
                count / 1e9 / max(seconds, 1e-9),
            )

    def _layer(self, name: str) -> Any:
        """A layer of this worker's model; its ``kv_cache`` are the KV blocks."""
        return self._vllm_config.compilation_config.static_forward_context[name]

    def _described(self, file: SystemKVFile) -> dict[str, Layer]:
        """A file's layers by name. Raises SystemKVError where they are not this model's."""
        described = {layer.name: layer for layer in file.manifest.layers}
        ours = set(self._layers)
        if missing := sorted(ours - described.keys()):
            raise SystemKVError(f"{file.path}: has no KV for layer {missing[0]} of this model")
        parallel = self._vllm_config.parallel_config
        extra = described.keys() - ours
        if extra and parallel.pipeline_parallel_size == 1:
            raise SystemKVError(f"{file.path}: has KV for {min(extra)}, which this model lacks")
        return described

    def _write_group(
        self,
        file: SystemKVFile,
        described: Mapping[str, Layer],
        group: CacheGroup,
        placement: Placement,
    ) -> int:
        """Write one group's layers into the blocks past the shared ones; returns the bytes."""
        begin, end = (x * group.block_size for x in (placement.shared, len(placement.block_ids)))
        slots = _slots(placement.block_ids[placement.shared :], group.block_size)
        tensor_parallel_size = self._vllm_config.parallel_config.tensor_parallel_size
        written = 0
        for name in group.layers:
            layer, wanted = self._layer(name), described[name]
            if begin < wanted.first_token:
                raise SystemKVError(
                    f"{file.path}: layer {name} begins at token {wanted.first_token:,}, this "
                    f"engine's KV blocks at {begin:,}: build it with --block-size "
                    f"{alignment(self._groups)}"
                )
            cache, heads = layer.kv_cache, layer.impl.num_kv_heads
            first = _first_head(wanted.kv_heads, heads, tensor_parallel_size)
            _check_shape(file, layer, wanted)
            start = begin - wanted.first_token
            slots = slots.to(cache.device)
            keys, values = (
                tensor[start : start + end - begin, first : first + heads]
                .to(cache.device)
                .contiguous()
                for tensor in file.tensors(name)
            )
            layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
            written += keys.nbytes + values.nbytes
        return written

    def write_warm(self) -> None:
        """Write the remembered files; one that cannot be is left out, with one line."""
        warm, self._warm = self._warm, ()
        written = []
        for file, placement in warm:
            try:
                self._write_group(file, self._described(file), self._groups[0], placement)
            except Exception as error:  # the start goes on
                metrics.say_once(f"remembered prefix not loaded: {error}")
            else:
                written.append((file, placement))
        self.warm_written = frozenset((file.seal, x) for file, x in written)
        if written and self._vllm_config.parallel_config.rank == 0:
            blocks = sum(len(x.block_ids) - x.shared for _, x in written)
            metrics.logger.info(
                "relay: loaded %d remembered prefix%s: %s tokens",
                len(written),
                "" if len(written) == 1 else "es",
                f"{blocks * self._groups[0].block_size:,}",
            )

    def compare(self) -> None:
        """Raise SystemKVError if the weights are not those at load, or cannot be compared."""
        if self._weights == _UNREADABLE or _fingerprint() != self._weights:
            raise SystemKVError(_CHANGED)

    def forget(self) -> None:
        """Unpin what layers packed: the blocks may hold something else from now on."""
        for layer in map(self._layer, self._layers):
            if forget := getattr(layer.impl, "forget", None):
                forget()

    def rewrite(self, reset: int) -> str | None:
        """Write again after the n-th reset; returns None, or why the KV must not be used any more.

        Before the first request, as reset 0, the blocks are as they were written, but the weights
        may be others.
        """
        try:
            if reset:
                self.forget()
            elif self._weights == _UNREADABLE:
                return None
            if _fingerprint() != self._weights:
                return _CHANGED
            if reset:
                self.write()
        except Exception as error:  # the engine goes on without them
            metrics.count_fallback("loading")
            return " ".join(str(error).split()) or type(error).__name__
        return None


def _slots(block_ids: Sequence[int], block_size: int) -> torch.Tensor:
    """KV cache slots of all tokens of the blocks, int64."""
    offsets = torch.arange(block_size)
    return (torch.tensor(block_ids).unsqueeze(1) * block_size + offsets).flatten()


def _first_head(total: int, heads: int, tensor_parallel_size: int) -> int:
    """The first KV head of this worker, as vLLM's QKVParallelLinear distributes them.

    With more workers than KV heads, adjacent workers hold the same head. SystemKVError where the
    file's heads are not this model's.
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


def _check_shape(file: SystemKVFile, layer: Any, wanted: Layer) -> None:
    ours = (layer.impl.head_size, float(layer._k_scale_float), float(layer._v_scale_float))
    theirs = (wanted.head_size, wanted.k_scale, wanted.v_scale)
    if ours != theirs:
        raise SystemKVError(
            f"{file.path}: layer {wanted.name} has head size, k scale, v scale {theirs}, "
            f"in this model {ours}"
        )


def _fingerprint() -> _Fingerprint:
    """Sums over all of this worker's parameters: a change of any one element changes them.

    vLLM's CPU engine packs the weights of most linear layers into a function, ``cpu_linear``, and
    empties their parameters; new weights come with a new function.
    """
    model = compat.worker().model_runner.get_model()
    total = blake3.blake3()
    for parameter in model.parameters():
        content = parameter.detach().contiguous().flatten().view(torch.uint8)
        if content.storage_offset() % 8:
            content = content.clone()  # words are aligned
        whole = content.numel() // _ROW_BYTES * _ROW_BYTES
        rows = content[:whole].view(torch.int64).view(-1, _ROW_BYTES // 8)
        for part in (rows.sum(1), rows.sum(0), content[whole:]):
            total.update(part.cpu().view(torch.uint8).numpy().data)
    functions = []
    for name, module in model.named_modules():
        functions.append(vars(module).get("cpu_linear"))
        emptied = "weight" in module._parameters and module._parameters["weight"] is None
        if emptied and hasattr(module, "quant_method") and functions[-1] is None:
            raise RuntimeError(f"{name} keeps its weights where they cannot be read")  # CPU int8
    return total.digest(), [f and weakref.ref(f) for f in functions]
