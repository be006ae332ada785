"""A KV connector that copies what a prefill writes into the KV cache, for `build`.

It taps ``do_kv_cache_update``, where keys and values are rows after RoPE in no block layout. The
scheduler's side tells which rows of a step belong to which prompt. Each worker puts its layers and
KV heads into one mapped file per prompt; the parent joins them.
"""

import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)

from vllm_relay import compat
from vllm_relay.patching import TargetMoved
from vllm_relay.system_kv.cache_groups import cache_groups
from vllm_relay.system_kv.file import SystemKVError
from vllm_relay.system_kv.idle_connector import IdleConnector
from vllm_relay.system_kv.manifest import Layer
from vllm_relay.system_kv.placement import kept_tokens

MODULE = __name__
# File with two int64, tokens and steps done; mapped by the first worker and its parent.
PROGRESS = "progress"


@dataclass(frozen=True)
class Shard:
    """One worker's part of every prompt: a flat file per prompt, layer by layer K then V.

    ``kept``: of layers with a window, the tokens at a prompt's end that its file keeps.
    """

    layers: tuple[Layer, ...]
    dtype: str
    kept: Mapping[str, int]

    @property
    def elements_per_token(self) -> int:
        return sum(2 * layer.kv_heads * layer.head_size for layer in self.layers)

    def map(self, file: Path, tokens: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values ``[tokens, kv_heads, head_size]`` of each layer, mapped read-write."""
        dtype = getattr(torch, self.dtype)
        size = tokens * self.elements_per_token
        with file.open("ab") as opened:  # a full disk is an error here, not a signal later
            os.posix_fallocate(opened.fileno(), 0, size * dtype.itemsize)
        flat = torch.from_file(str(file), shared=True, size=size, dtype=dtype)
        tensors, begin = {}, 0
        for layer in self.layers:
            shape = 2, tokens, layer.kv_heads, layer.head_size
            end = begin + math.prod(shape)
            keys, values = flat[begin:end].view(shape)
            tensors[layer.name] = keys, values
            begin = end
        return tensors


def map_progress(folder: Path) -> torch.Tensor:
    """The counts in `PROGRESS`: tokens and steps done."""
    path = str(folder / PROGRESS)
    return torch.from_file(path, shared=True, size=2, dtype=torch.int64)


def shard_file(folder: Path, prompt: int, rank: int) -> Path:
    return folder / f"prompt-{prompt}-rank-{rank}.kv"


def read_shards(folder: Path) -> dict[int, Shard]:
    """The shards that the workers described, by worker rank."""
    shards = {}
    for path in folder.glob("rank-*.json"):
        given = json.loads(path.read_text())
        given["layers"] = tuple(Layer(**layer) for layer in given["layers"])
        shards[int(path.stem.removeprefix("rank-"))] = Shard(**given)
    return dict(sorted(shards.items()))


@dataclass
class CaptureMetadata(KVConnectorMetadata):
    """Per prompt in a step: its index, its first token, and its tokens' slots in each group."""

    parts: list[tuple[int, int, list[list[int]]]] = field(default_factory=list)


class CaptureConnector(IdleConnector):
    """Extra config: ``folder`` for the shards, ``prompts``: the token ids of each prompt."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._folder = Path(extra["folder"])
        self._prompts: list[list[int]] = extra["prompts"]
        self._groups = cache_groups(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._requests: dict[str, tuple[int, list[list[int]]]] = {}
        else:
            self._prepare_worker()

    # In the scheduler.

    def build_connector_meta(self, scheduler_output: Any) -> CaptureMetadata:
        scheduled = scheduler_output.num_scheduled_tokens
        metadata = CaptureMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            prompt = self._prompts.index(new.prompt_token_ids)
            self._requests[new.req_id] = prompt, [list(ids) for ids in new.block_ids]
            self._add(metadata, new.req_id, new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            _, blocks = self._requests[req_id]
            for number, ids in enumerate(blocks):
                if req_id in cached.resumed_req_ids:
                    ids.clear()  # it was preempted and begins anew
                ids.extend(new_blocks[number] if new_blocks else ())
            self._add(metadata, req_id, start, scheduled[req_id])
        return metadata

    def _add(self, metadata: CaptureMetadata, req_id: str, start: int, count: int) -> None:
        prompt, blocks = self._requests[req_id]
        end = min(start + count, len(self._prompts[prompt]))
        if start < end:
            # A window's first blocks are freed while its request runs, and not those of this step.
            slots = [
                [ids[t // size] * size + t % size for t in range(start, end)]
                for size, ids in zip((g.block_size for g in self._groups), blocks, strict=True)
            ]
            metadata.parts.append((prompt, start, slots))

    # In the workers.

    def _prepare_worker(self) -> None:
        context = self._vllm_config.compilation_config.static_forward_context
        group_of = {name: i for i, group in enumerate(self._groups) for name in group.layers}
        layers, kept = [], {}
        for name in sorted(group_of, key=list(context).index):
            layer = context[name]
            tokens = kept_tokens(self._groups[group_of[name]], self._groups)
            if tokens is not None:
                kept[name] = tokens
            take = functools.partial(self._take, name, group_of[name])
            try:
                compat.tap_kv_updates(layer.impl, take)
            except TargetMoved:
                title = type(layer.impl).__name__
                raise SystemKVError(
                    f"layer {name}: attention backend {title} is not supported"
                ) from None
            scales = float(layer._k_scale_float), float(layer._v_scale_float)
            layers.append(Layer(name, layer.impl.num_kv_heads, layer.impl.head_size, *scales))
        dtype = str(self._vllm_config.model_config.dtype).removeprefix("torch.")
        shard = Shard(tuple(layers), dtype, kept)
        rank = self._vllm_config.parallel_config.rank
        self._rows: dict[int, torch.Tensor] = {}  # by group, the same for every layer of a step
        self._taken = dict.fromkeys(group_of, 0)  # rows of this step, by layer
        self._tensors = [
            shard.map(shard_file(self._folder, prompt, rank), len(tokens))
            for prompt, tokens in enumerate(self._prompts)
        ]
        self._progress = map_progress(self._folder) if rank == 0 else None
        (self._folder / f"rank-{rank}.json").write_text(json.dumps(asdict(shard)))

    def _take(
        self, name: str, group: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Copy the prompts' rows; key and value ``[T, kv_heads, head_size]``, slots ``[T]``."""
        if not self.has_connector_metadata():
            return  # a warm-up
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CaptureMetadata)
        if not metadata.parts:
            return
        parts = [(prompt, start, of_group[group]) for prompt, start, of_group in metadata.parts]
        if group not in self._rows:
            wanted = torch.tensor(
                [slot for _, _, part in parts for slot in part], device=slots.device
            )
            order = slots.argsort()
            self._rows[group] = order[torch.searchsorted(slots[order], wanted)]
            assert torch.equal(slots[self._rows[group]], wanted)
        for tensor, which in ((key, 0), (value, 1)):
            rows = tensor[self._rows[group]].cpu()
            begin = 0
            for prompt, start, part in parts:
                target = self._tensors[prompt][name][which]
                target[start : start + len(part)] = rows[begin : begin + len(part)]
                begin += len(part)
        self._taken[name] += len(self._rows[group])

    def wait_for_save(self) -> None:
        # The parent compares these counts: rows that some layer did not show are missing.
        taken = min(self._taken.values())
        self._rows.clear()
        self._taken = dict.fromkeys(self._taken, 0)
        if self._progress is not None and taken:
            self._progress += torch.tensor([taken, 1])
