"""The worker's side of ``remember``: KV blocks into files, and files into KV blocks.

A few blocks are copied before each forward pass, for a share of the time that steps take; a thread
of the lowest priority writes the file.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from vllm_relay import metrics
from vllm_relay.backend.kv_layout import BlockLayout, find_layout
from vllm_relay.config import SystemKVConfig
from vllm_relay.system_kv.file import SystemKVError, write_file
from vllm_relay.system_kv.identity import engine_settings
from vllm_relay.system_kv.manifest import Layer, Manifest, tensor_names
from vllm_relay.system_kv.placement import CacheGroup, Placement
from vllm_relay.system_kv.remembered_files import make_room, mark
from vllm_relay.system_kv.scratch import scratch_folder
from vllm_relay.system_kv.writer import Writer

# The share of a step's time that copying may take, and the longest step that counts: an engine
# that waited for requests has not had a long step.
_COPY_SHARE = 0.02
_LONGEST_STEP = 0.25


@dataclass(frozen=True, kw_only=True)
class Save:
    """Write a prefix's blocks to a file of this name; ``hot_at`` orders it among the files."""

    name: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    hot_at: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """Write a file into these blocks, those past the first ``shared``."""

    path: str
    block_ids: tuple[int, ...]
    shared: int


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The scheduler's message of one step.

    ``drop``: the blocks of the last `Save` are no longer held. ``compare``: the weights may be
    others. ``at_once``: no request waits for this step.
    """

    save: Save | None = None
    load: Load | None = None
    drop: bool = False
    compare: bool = False
    at_once: bool = False


@dataclass(frozen=True)
class Report:
    """The worker's answer: ``what`` is done, of the file ``name``, or the problem.

    ``what``: "copied" (the blocks are needed no longer), "saved", "loaded" or "compared".
    """

    what: str
    name: str = ""
    problem: str | None = None


@dataclass
class _Job:
    """One `Save` under way; ``done``: copies of single blocks, layer by layer."""

    order: Save
    known: Future[bool]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    done: int = 0
    written: Future[int] | None = None


class Saver:
    """Saves and loads prefixes of one worker, with the layers of ``group``.

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
        self._layouts: dict[tuple[int, int], BlockLayout] = {}
        self._thread = ThreadPoolExecutor(1, "relay-remember", _yield_to_others)
        self._job: _Job | None = None
        self._reports: list[Report] = []
        self._step_began = time.perf_counter()

    def take(self, orders: Orders | None) -> None:
        """Do a step's part of the work, before its forward pass."""
        began = time.perf_counter()
        step, self._step_began = min(began - self._step_began, _LONGEST_STEP), began
        if orders is not None and orders.drop:
            self._job = None
        if self._job is not None:
            self._go_on(began + _COPY_SHARE * step)
        if orders is None:
            return
        if orders.compare:
            self._try("compared", "", self._writer.compare)
        if (load := orders.load) is not None:
            placement = Placement(load.block_ids, load.shared)
            self._try("loaded", load.path, lambda: self._writer.load(load.path, placement))
        if orders.save is not None:
            path = self._folder / orders.save.name
            known = self._thread.submit(mark, path, orders.save.hot_at)
            self._job = _Job(orders.save, known)
        while orders.at_once and self._job is not None:
            pending = self._job.written or self._job.known
            pending.exception()
            self._go_on(float("inf"))

    def reports(self) -> list[Report]:
        """Reports of what was done since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def _try(self, what: str, name: str, act: Callable[[], Any]) -> None:
        """Report that ``act`` is done, or the problem: the engine goes on."""
        try:
            act()
        except Exception as error:
            self._reports.append(Report(what, name, _one_line(error)))
        else:
            self._reports.append(Report(what, name))

    def _go_on(self, deadline: float) -> None:
        """Copy until the deadline, at least one block of a layer, and have the file written."""
        job = self._job
        assert job is not None
        name = job.order.name
        try:
            if job.written is not None:
                if job.written.done():
                    self._job = None
                    _log(job, job.written.result())
                    self._reports.append(Report("saved", name))
            elif job.known.done():
                if job.known.result():
                    self._job = None
                    self._reports.append(Report("saved", name))
                else:
                    self._copy(job, deadline)
        except Exception as error:
            self._job = None
            self._reports.append(Report("saved", name, _one_line(error)))

    def _copy(self, job: _Job, deadline: float) -> None:
        blocks = job.order.block_ids
        if not job.tensors:
            self._begin(job)
        while job.done < len(blocks) * len(self._group.layers):
            number, column = divmod(job.done, len(blocks))
            name = self._group.layers[number]
            cache = self._layer(name).kv_cache
            rows = self._layout(name).rows(cache[blocks[column]])
            begin = column * self._group.block_size
            for target, part in zip(tensor_names(name), rows, strict=True):
                job.tensors[target][begin : begin + self._group.block_size] = part
            job.done += 1
            if time.perf_counter() >= deadline:
                return
        self._reports.append(Report("copied", job.order.name))
        job.written = self._thread.submit(self._write, job)

    def _begin(self, job: _Job) -> None:
        """Allocate the tensors of a prefix that fits into the folder."""
        dtype = self._vllm_config.model_config.dtype
        shapes = self._manifest(job.order).shapes()
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > self._limit:
            raise SystemKVError(f"{size:,} bytes are more than system_kv.remember_gib allows")
        job.tensors = tensors

    def _write(self, job: _Job) -> int:
        """Write the file, in the thread; returns its bytes."""
        manifest, path = self._manifest(job.order), self._folder / job.order.name
        size = sum(tensor.nbytes for tensor in job.tensors.values())
        with scratch_folder(self._folder) as scratch:
            make_room(self._folder, size, self._limit)
            written = write_file(path, manifest, job.tensors, scratch, threads=1)
        mark(path, job.order.hot_at)
        return written

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


def _log(job: _Job, size: int) -> None:
    metrics.logger.info(
        "relay: remembered a prefix of %s tokens in %s (%.1f MB)",
        f"{len(job.order.token_ids):,}",
        job.order.name,
        size / 1e6,
    )


def _yield_to_others() -> None:
    """Let this thread run when no thread of the engine wants its core (Linux)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
