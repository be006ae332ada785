"""The worker's side of ``remember``: KV blocks become files.

A few blocks are copied before each forward pass, for a share of the time that steps take; a thread
of the lowest priority writes the file.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

import torch

from vllm_relay import metrics
from vllm_relay.backend.kv_layout import BlockLayout, find_layout
from vllm_relay.config import SystemKVConfig
from vllm_relay.system_kv.file import SystemKVError, write_file
from vllm_relay.system_kv.identity import engine_settings
from vllm_relay.system_kv.manifest import Layer, Manifest, tensor_names
from vllm_relay.system_kv.messages import Orders, Report, Save
from vllm_relay.system_kv.parts import LayerKV, hand_over, join, take_over
from vllm_relay.system_kv.placement import CacheGroup
from vllm_relay.system_kv.remembered_files import make_room, mark
from vllm_relay.system_kv.scratch import scratch_folder
from vllm_relay.system_kv.writer import Writer

# The share of a step's time that copying may take, and the longest step that counts: an engine
# that waited for requests has not had a long step.
_COPY_SHARE = 0.02
_LONGEST_STEP = 0.25
# Seconds in a step that waits for a file.
_PATIENCE = 0.1

_Tensors = dict[str, torch.Tensor]


@dataclass
class _Job:
    """One `Save` under way.

    ``room``: tensors to copy into, or None if the prefix has a file or is given up. ``done``:
    copies of single blocks, layer by layer.
    """

    key: str
    order: Save
    given_up: Event = field(default_factory=Event)
    room: Future[_Tensors | None] = field(default_factory=Future)
    done: int = 0
    written: Future[int | None] | None = None


class Saver:
    """Saves prefixes of one worker, with the layers of ``group``.

    The first worker of an engine writes the files; the others hand their parts over to it.
    ``identity``: the fields of the engine's `Identity`.
    """

    def __init__(
        self,
        vllm_config: Any,
        group: CacheGroup,
        writer: Writer,
        identity: Mapping[str, Any],
        settings: SystemKVConfig,
    ) -> None:
        assert settings.remember is not None
        self._vllm_config, self._group, self._writer = vllm_config, group, writer
        self._identity, self._folder = identity, Path(settings.remember)
        self._limit = int(settings.remember_gib * 2**30)
        parallel = vllm_config.parallel_config
        self._rank, self._workers = parallel.rank, parallel.world_size
        self._layouts: dict[tuple[int, int], BlockLayout] = {}
        self._thread = ThreadPoolExecutor(1, "relay-remember", _yield_to_others)
        self._job: _Job | None = None
        self._reports: list[Report] = []
        self._step_began = time.perf_counter()

    def take(self, orders: Orders | None) -> None:
        """Do a step's part of the work, before its forward pass."""
        began = time.perf_counter()
        step, self._step_began = min(began - self._step_began, _LONGEST_STEP), began
        if orders is not None and (orders.drop or orders.save):
            self.give_up()
        if self._job is not None:
            self._go_on(began + _COPY_SHARE * step)
        if orders is None:
            return
        if orders.compare:
            try:
                self._writer.compare()
            except Exception as error:  # the engine goes on
                self._report(orders.key, "compared", "", error)
            else:
                self._report(orders.key, "compared", "")
        if orders.save is not None:
            self._job = _Job(orders.key, orders.save)
            self._job.room = self._thread.submit(self._make_room, self._job)
        if orders.at_once and (job := self._job) is not None:
            self._go_on(float("inf"))
            # Not for long: another worker may be waited for, which this step waits for.
            pending: Future[Any] = job.written or job.room
            wait([pending], _PATIENCE)

    def give_up(self) -> None:
        """End what is under way, but for a file that is being written."""
        if self._job is not None:
            self._job.given_up.set()
            self._job = None

    def reports(self) -> list[Report]:
        """Reports of what was done since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def _report(self, key: str, what: str, name: str, error: Exception | None = None) -> None:
        problem = None if error is None else _one_line(error)
        self._reports.append(Report(key=key, what=what, name=name, problem=problem))

    def _make_room(self, job: _Job) -> _Tensors | None:
        """`_Job.room`; the first worker marks a file that is there as hot.

        Raises SystemKVError if the prefix does not fit into the folder.
        """
        path = self._folder / job.order.name
        if job.given_up.is_set():
            return None
        if mark(path, job.order.hot_at) if self._rank == 0 else path.exists():
            return None
        dtype = self._vllm_config.model_config.dtype
        shapes = self._manifest(job.order).shapes()
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        self._check_size(tensors)
        for tensor in tensors.values():
            tensor.view(torch.uint8).numpy().fill(0)  # no page is missing when a step copies
        return tensors

    def _go_on(self, deadline: float) -> None:
        """Copy until the deadline, at least one block of a layer, and have the file written."""
        job = self._job
        assert job is not None
        name = job.order.name
        try:
            if job.written is not None:
                if job.written.done():
                    self._job = None
                    if (size := job.written.result()) is not None:
                        _log(job, size)
                    if self._rank == 0:
                        self._report(job.key, "saved", name)
            elif job.room.done():
                if (tensors := job.room.result()) is not None:
                    self._copy(job, tensors, deadline)
                else:
                    self._job = None
                    if self._rank == 0:
                        self._report(job.key, "saved", name)
        except Exception as error:
            self._job = None
            self._report(job.key, "saved", name, error)

    def _copy(self, job: _Job, tensors: _Tensors, deadline: float) -> None:
        blocks = job.order.block_ids
        while job.done < len(blocks) * len(self._group.layers):
            number, column = divmod(job.done, len(blocks))
            name = self._group.layers[number]
            cache = self._layer(name).kv_cache
            rows = self._layout(name).rows(cache[blocks[column]])
            begin = column * self._group.block_size
            for target, part in zip(tensor_names(name), rows, strict=True):
                tensors[target][begin : begin + self._group.block_size] = part
            job.done += 1
            if time.perf_counter() >= deadline:
                return
        self._report(job.key, "copied", job.order.name)
        job.written = self._thread.submit(self._write, job, tensors)

    def _check_size(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """The bytes of a file. Raises SystemKVError if it does not fit into the folder."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > self._limit:
            raise SystemKVError(f"{size:,} bytes are more than system_kv.remember_gib allows")
        return size

    def _write(self, job: _Job, tensors: _Tensors) -> int | None:
        """Write the file or hand the part over, in the thread.

        Returns the bytes of the file, or None if there is one, or the first worker writes it.
        """
        manifest, path = self._manifest(job.order), self._folder / job.order.name
        if self._rank != 0:
            name = f"{job.key}-{self._rank}"
            hand_over(self._folder, name, manifest, tensors, lambda: _is_over(job, path))
            return None
        if self._workers > 1:
            parts = self._parts(job, path, tensors)
            if parts is None:
                return None
            total = self._vllm_config.model_config.get_total_num_kv_heads()
            tensors, layers = join(parts, total)
            manifest = replace(manifest, layers=tuple(layers))
        size = self._check_size(tensors)
        with scratch_folder(self._folder) as scratch:
            make_room(self._folder, size, self._limit)
            written = write_file(path, manifest, tensors, scratch, threads=1)
        mark(path, job.order.hot_at)
        return written

    def _parts(self, job: _Job, path: Path, tensors: _Tensors) -> list[LayerKV] | None:
        """KV of all workers in the order of their ranks; None if it is not wanted any more."""
        found = []
        for layer in self._manifest(job.order).layers:
            keys, values = (tensors[name] for name in tensor_names(layer.name))
            found.append(LayerKV(layer=layer, keys=keys, values=values))
        for rank in range(1, self._workers):
            file = take_over(self._folder, f"{job.key}-{rank}", lambda: _is_over(job, path))
            if file is None:
                return None
            for layer in file.manifest.layers:
                keys, values = file.tensors(layer.name, threads=1)
                found.append(LayerKV(layer=layer, keys=keys, values=values))
        return found

    def _manifest(self, order: Save) -> Manifest:
        layers = []
        for name in self._group.layers:
            layer = self._layer(name)
            scales = float(layer._k_scale_float), float(layer._v_scale_float)
            layers.append(Layer(name, layer.impl.num_kv_heads, layer.impl.head_size, *scales))
        return Manifest(
            name=order.name.removesuffix(".relay"),
            kind="token-ids",
            token_ids=order.token_ids,
            text=None,
            **{**self._identity, "chat_template": None},
            layers=tuple(layers),
            engine=engine_settings(self._vllm_config),
            created=datetime.now().astimezone().isoformat(timespec="seconds"),
            checksums={},
        )

    def _layer(self, name: str) -> Any:
        return self._vllm_config.compilation_config.static_forward_context[name]

    def _layout(self, name: str) -> BlockLayout:
        """The layout of a layer's blocks. Raises SystemKVError if it is unknown."""
        layer = self._layer(name)
        shape = layer.impl.num_kv_heads, layer.impl.head_size
        if shape not in self._layouts:
            cache = layer.kv_cache
            found = find_layout(
                lambda keys, values, block, slots: layer.impl.do_kv_cache_update(
                    layer, keys, values, block, slots
                ),
                *(shape[0], self._group.block_size, shape[1], cache.dtype),
            )
            if found is None or not cache[0, 0].is_contiguous():
                raise SystemKVError(f"layer {name} keeps its KV blocks in an unknown layout")
            self._layouts[shape] = found
        return self._layouts[shape]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    known = isinstance(error, (OSError, SystemKVError)) and text
    return text if known else f"{type(error).__name__}: {text}"


def _is_over(job: _Job, path: Path) -> bool:
    """True if the parts of a job are not wanted: it is given up, or there is a file."""
    return job.given_up.is_set() or path.exists()


def _log(job: _Job, size: int) -> None:
    metrics.logger.info(
        "relay: remembered a prefix of %s tokens in %s (%.1f MB)",
        f"{len(job.order.token_ids):,}",
        job.order.name,
        size / 1e6,
    )


def _yield_to_others() -> None:
    """Let this thread run on any core of the server that no thread of the engine wants (Linux)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    # A worker's main thread, and what it starts, is bound to one of the cores that compute.
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        with suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(parent.pid))
