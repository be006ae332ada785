"""An engine of small layers that remembers: both of our sides, on vLLM's real BlockPool."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

from tests.unit.system_kv.files import small_manifest
from vllm_relay import compat
from vllm_relay.config import SystemKVConfig
from vllm_relay.system_kv.file import SystemKVFile
from vllm_relay.system_kv.manifest import Identity
from vllm_relay.system_kv.pinned_blocks import PinnedBlocks, as_request
from vllm_relay.system_kv.pins import Pins, answer, is_save
from vllm_relay.system_kv.placement import CacheGroup, place
from vllm_relay.system_kv.remembered_files import hottest_first
from vllm_relay.system_kv.remembering import Remembering
from vllm_relay.system_kv.retention import Retention
from vllm_relay.system_kv.saver import Saver
from vllm_relay.system_kv.warm_start import WarmStart, cached_blocks, choose
from vllm_relay.system_kv.writer import Writer

BLOCK, HEADS, WIDTH = 4, 2, 8
NAMES = ("layers.0", "layers.1")
HOT = list(range(100, 100 + 6 * BLOCK))
IDENTITY = {
    field.name: getattr(small_manifest(dtype="float32"), field.name) for field in fields(Identity)
}


def kv_of(token_ids: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[tokens, HEADS, WIDTH]`` that depend on all tokens before each."""
    before = torch.tensor(token_ids).cumsum(0).float()
    rows = before.view(-1, 1, 1) + torch.rand(HEADS, WIDTH, generator=torch.manual_seed(layer))
    return rows, -rows


class _Layer:
    def __init__(self, blocks: int, heads: int) -> None:
        self.num_kv_heads, self.head_size, self.impl = heads, WIDTH, self
        self._k_scale_float = self._v_scale_float = 1.0
        self.kv_cache = torch.zeros(blocks, heads, BLOCK, 2 * WIDTH)

    def do_kv_cache_update(self, layer: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        cache[slots // BLOCK, :, slots % BLOCK] = torch.cat([k, v], -1)


class Engine:
    """One engine over a folder; ``blocks`` of `BLOCK` tokens, each request one step."""

    def __init__(
        self,
        folder: Path,
        blocks: int = 64,
        gib: float = 1.0,
        most_saved: int = 1000,
        pinned: list[int] | None = None,
        workers: int = 1,
    ) -> None:
        """``pinned``: tokens of a system KV, of which the KV is not written. ``workers``: tensor
        parallel."""
        init_none_hash(compat.target("vllm.utils.hashing:get_hash_fn_by_name")("sha256"))
        settings = SystemKVConfig.from_mapping({"remember": folder, "remember_gib": gib})
        self._heads = HEADS // workers
        self.layers = [[_Layer(blocks + 1, self._heads) for _ in NAMES] for _ in range(workers)]
        configs: list[Any] = [
            SimpleNamespace(
                cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
                num_hash_lookahead_tokens=0,
                model_config=SimpleNamespace(
                    dtype=torch.float32,
                    max_model_len=blocks * BLOCK // 4,
                    get_total_num_kv_heads=lambda: HEADS,
                ),
                attention_config=SimpleNamespace(backend=None),
                parallel_config=SimpleNamespace(
                    tensor_parallel_size=workers,
                    pipeline_parallel_size=1,
                    world_size=workers,
                    rank=rank,
                ),
                compilation_config=SimpleNamespace(
                    static_forward_context=dict(zip(NAMES, layers, strict=True))
                ),
            )
            for rank, layers in enumerate(self.layers)
        ]
        self.config = configs[0]
        self.pool = BlockPool(blocks + 1, True, hash_block_size=BLOCK)
        self.retention = Retention()
        self.retention.attach(self.pool, blocks // 2, [BLOCK])
        group = CacheGroup(block_size=BLOCK, window=None, layers=NAMES)
        prompts = [pinned] if pinned else []
        salts = [None] * len(prompts)
        paths = [str(path) for path in hottest_first(folder)]
        warm = choose(paths, prompts, salts, group, blocks // 2, speaks=True)
        self.remembering = Remembering(
            self.config,
            block_size=BLOCK,
            most_saved=most_saved,
            identity=IDENTITY,
            warm=WarmStart(self.config, warm),
        )
        self.pins = Pins(
            block_size=BLOCK,
            budget=0.5,
            max_model_len=blocks * BLOCK // 4,
            longest=blocks // 4,
            saved=self.remembering.saved,
        )
        loaded: Any = [
            SimpleNamespace(
                path="x", seal="x", manifest=SimpleNamespace(name="x", token_ids=x, tokens=len(x))
            )
            for x in prompts
        ]
        placed = place(prompts, [group], salts)
        self.files = PinnedBlocks(
            self.config, loaded, salts, placed, [group], blocks // 4, settings
        )
        self.files.take(self.pool, self.remembering.before_reset, self.pins)
        self.files.rewritten(0, None)
        self.pins.attach(self.pool, self.files.block_ids)
        self.remembering.attach(self.pool, self.retention, self.pins.prefixes)
        self.writers = [Writer(config, [], [], [group], warm) for config in configs]
        for writer in self.writers:
            writer.write_warm()
        self.savers = [
            Saver(config, group, writer, IDENTITY, settings)
            for config, writer in zip(configs, self.writers, strict=True)
        ]
        self._at_once = ThreadPoolExecutor(workers)

    def request(self, token_ids: list[int], salt: str | None = None, command: Any = None) -> int:
        """Serve one prompt; returns the blocks that it found cached, with the right content.

        ``answer`` is the one to its command.
        """
        name = f"{len(token_ids)} {salt}"
        request = as_request(self.config, self.pool, name, token_ids, salt)
        request.kv_transfer_params = {"relay": command} if command is not None else None
        if self.remembering.warm.pending:
            written = [writer.warm_written for writer in self.writers]
            self.remembering.written(None, frozenset.intersection(*written))
        while is_save(request) and self.remembering.saves(request):
            self.step()
        self.remembering.asks(request)
        found = cached_blocks(self.pool, request.block_hashes)
        self.pool.touch(found)
        count = len(request.block_hashes)
        blocks = [*found, *self.pool.get_new_blocks(count - len(found))]
        self.pool.cache_full_blocks(request, blocks, len(found), count, BLOCK, 0)
        self.remembering.begins(request)
        self.pins.count_hit(blocks)
        self.retention.ask(request.block_hashes)
        self.step()
        held = [b.block_id * BLOCK + i for b in blocks for i in range(BLOCK)]
        slots = torch.tensor(held, dtype=torch.long)
        cached = len(found) * BLOCK
        for rank, number in product(range(len(self.layers)), range(len(NAMES))):
            layer, first = self.layers[rank][number], rank * self._heads
            keys, values = (
                rows[:, first : first + self._heads]
                for rows in kv_of(token_ids[: len(slots)], number)
            )
            mine = layer.kv_cache[slots[:cached] // BLOCK, :, slots[:cached] % BLOCK]
            assert torch.equal(mine, torch.cat([keys, values], -1)[:cached])
            layer.do_kv_cache_update(
                layer, keys[cached:], values[cached:], layer.kv_cache, slots[cached:]
            )
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.answer = (answer(self.pins, request) or {}).get("relay")
        self.pool.free_blocks(reversed(blocks))
        return len(found)

    def step(self, preempted: bool = False) -> Any:
        """One engine step; returns the orders."""
        output = SimpleNamespace(preempted_req_ids={"x"} if preempted else set())
        orders = self.remembering.orders(output)
        list(self._at_once.map(lambda saver: saver.take(orders), self.savers))
        for saver in self.savers:
            for report in saver.reports():
                self.remembering.reported(report)
        return orders

    def stop(self) -> None:
        self.remembering.stop(self.step)

    def begin_round(self) -> None:
        """Let the next step begin to save."""
        self.remembering._next_round = 0.0

    def ask(self, prompt: list[int], times: int = 4, salt: str | None = None) -> None:
        """Serve several requests under one prompt."""
        for i in range(times):
            self.request([*prompt, *range(1000 * i, 1000 * i + 2 * BLOCK)], salt)

    def save(self) -> None:
        """A whole round of saving."""
        self.begin_round()
        until(lambda: not (self.step() or self.remembering._saving))


def saved(folder: Path) -> list[list[int]]:
    """The prefixes in a folder, the hottest first."""
    return [list(SystemKVFile(path).manifest.token_ids) for path in hottest_first(folder)]


def until(done: Callable[[], bool]) -> None:
    """Wait for up to half a minute."""
    for _ in range(30_000):
        if done():
            return
        time.sleep(0.001)
    raise TimeoutError


def broken(*args: Any, **kwargs: Any) -> int:
    """A failure, in place of a function."""
    raise RuntimeError("planted\nfailure")
