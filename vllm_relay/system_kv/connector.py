"""The KV connector that loads system KVs at start and keeps them, and retains hot prefixes.

vLLM makes one object in the scheduler and one in every worker. The scheduler's takes the blocks
when it is bound to the block pool. The workers write them when they are asked for their handshake
metadata, the last call before the engine is ready. From then on requests find the blocks by vLLM's
ordinary prefix caching, and this connector only counts hits and rewrites after a cache reset.
With ``learn`` it also counts what requests ask for, and `Retention` orders what vLLM evicts. With
``remember``, `Remembering` in the scheduler and `Saver` in the worker save hot prefixes, and
`WarmStart` and `Writer` load them at the next start.
With ``pins``, `Pins` in the scheduler answers commands that requests bring.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)

from vllm_relay import compat, metrics
from vllm_relay.system_kv.admission import REMEMBERED, open_admitted, read_settings
from vllm_relay.system_kv.cache_groups import cache_groups, longest_blocks, only_group
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.idle_connector import IdleConnector
from vllm_relay.system_kv.messages import StepMetadata, WorkerMetadata
from vllm_relay.system_kv.pinned_blocks import PinnedBlocks
from vllm_relay.system_kv.pins import Pins, answer, is_save
from vllm_relay.system_kv.placement import CacheGroup, Placement, place
from vllm_relay.system_kv.remembering import Remembering
from vllm_relay.system_kv.retention import Retention
from vllm_relay.system_kv.saver import Saver
from vllm_relay.system_kv.stats import HOT, SystemKVMetrics, SystemKVStats
from vllm_relay.system_kv.warm_start import WarmStart, choose
from vllm_relay.system_kv.writer import Writer


def _or_given_up(answer: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A call by the scheduler: where it fails, system KVs are given up, and it gets ``answer``."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def guarded(self: "SystemKVConnector", *args: Any) -> Any:
            try:
                return method(self, *args)
            except Exception as error:
                self._pins.failed(error)
                if self._remembering is not None:
                    self._remembering.warm.give_up()
                return answer

        return guarded

    return decorate


class SystemKVConnector(IdleConnector):
    """``--kv-transfer-config '{"kv_connector": "SystemKVConnector", "kv_role": "kv_producer",
    "kv_connector_extra_config": {"files": ["acme.relay"]}}'``

    ``--additional-config.relay.system_kv acme.relay`` stands for it. The extra config takes the
    settings of `SystemKVConfig`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        settings, (files, salts) = read_settings(extra), open_admitted(extra)
        scheduler = role == KVConnectorRole.SCHEDULER
        saves = settings.remember is not None
        memory = _one_group("remember", saves, kv_cache_config, speaks=scheduler)
        pinning = _one_group("pins", settings.pins, kv_cache_config, speaks=scheduler)
        # Hot prefixes are retained in groups of any kind.
        groups = [memory[0]] if memory else []
        if settings.files or not (settings.learns or settings.pins):
            groups = cache_groups(kv_cache_config)
        prompts = [file.manifest.token_ids for file in files]
        placed = place(prompts, groups, salts)
        warm: list[tuple[SystemKVFile, Placement]] = []
        if memory is not None:
            room = int(settings.budget * (kv_cache_config.num_blocks - 1))
            paths = extra[REMEMBERED]["warm"]
            warm = choose(paths, prompts, salts, memory[0], room, speaks=scheduler)
        self._asked: int | None = None  # the last reset sent to the workers
        self._may_rewrite = False
        self._answer: WorkerMetadata | None = None
        self._sent = SystemKVStats()
        self._remembering: Remembering | None = None
        self._saver: Saver | None = None
        if scheduler:
            longest = 0
            if settings.files or pinning:
                longest = longest_blocks(vllm_config, kv_cache_config)
            self._pins = PinnedBlocks(vllm_config, files, salts, placed, groups, longest, settings)
            self._retention = Retention() if settings.learns else None
            if memory is not None:
                model, parallel = vllm_config.model_config, vllm_config.parallel_config
                heads = model.get_total_num_kv_heads() / model.get_num_kv_heads(parallel)
                workers = parallel.pipeline_parallel_size * heads
                self._remembering = Remembering(
                    vllm_config,
                    block_size=memory[0].block_size,
                    most_saved=int(settings.remember_gib * 2**30 / (memory[1] * workers)),
                    identity=extra[REMEMBERED]["identity"],
                    warm=WarmStart(vllm_config, warm),
                )
            self._by_hand: Pins | None = None
            if pinning is not None:
                self._by_hand = Pins(
                    block_size=pinning[0].block_size,
                    budget=settings.budget,
                    max_model_len=vllm_config.model_config.max_model_len,
                    longest=longest,
                    saved=self._remembering.saved if self._remembering else None,
                )
            self._budget = settings.budget
            self._block_sizes = [
                group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups
            ]
            compat.extend_engine()
        else:
            metrics.set_speaker(vllm_config.parallel_config.rank == 0)
            self._writer = Writer(vllm_config, files, placed, groups, warm)
            if memory is not None:
                identity = extra[REMEMBERED]["identity"]
                self._saver = Saver(vllm_config, memory[0], self._writer, identity, settings)

    # In the scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        usable, remembering = gpu_block_pool.get_num_free_blocks(), self._remembering
        by_hand = self._by_hand
        self._pins.take(gpu_block_pool, remembering.before_reset if remembering else None, by_hand)
        if by_hand is not None:
            by_hand.attach(gpu_block_pool, self._pins.block_ids)
        if self._retention is not None:
            pinned = usable - gpu_block_pool.get_num_free_blocks()
            most = max(0, int(self._budget * usable) - pinned)
            self._retention.attach(gpu_block_pool, most, self._block_sizes)
            if remembering is not None:
                pins = by_hand.prefixes if by_hand else list
                remembering.attach(gpu_block_pool, self._retention, pins)
        for entry in self._pins.status():
            metrics.logger.info(
                "relay: system KV %s (%s in metrics): %s of %s tokens pinned in %d blocks, from %s",
                entry["name"],
                entry["label"],
                f"{entry['tokens_pinned']:,}",
                f"{entry['tokens']:,}",
                entry["blocks"],
                entry["path"],
            )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._wanted() is None:
            if self._remembering is None:
                return 0, False
            if self._by_hand is not None and is_save(request):
                return (None if self._remembering.saves(request) else 0), False
            self._remembering.asks(request)
            return 0, False
        # "Ask again", for the one step in which the workers compare their weights and, after a
        # reset, write. vLLM asks when it may schedule; a paused or sleeping engine may still be
        # getting new weights.
        self._may_rewrite = True
        return None, False

    def _wanted(self) -> int | None:
        """The number of the reset after which the workers must compare and write, or None."""
        warm = self._remembering and self._remembering.warm
        return 0 if warm and warm.pending else self._pins.wants_rewrite

    @_or_given_up()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._remembering is not None:
            self._remembering.begins(request)
        if request.num_preemptions == 0:
            self._pins.count_hit(blocks.blocks)
            if self._by_hand is not None:
                self._by_hand.count_hit(blocks.blocks[0])
            if self._retention is not None:
                self._retention.ask(request.block_hashes)

    @_or_given_up(StepMetadata(released=True))
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._retention is not None:
            self._retention.begin_step()
        wanted = self._wanted() if self._may_rewrite else None
        self._may_rewrite = False
        metadata = StepMetadata()
        if self._remembering is not None:
            metadata.orders = self._remembering.orders(scheduler_output)
        if wanted is None or wanted == self._asked:
            metadata.released = self._pins.released is not None
        else:
            self._asked = metadata.rewrite = wanted
        return metadata

    @_or_given_up()
    def update_connector_output(self, connector_output: Any) -> None:
        answer = connector_output.kv_connector_worker_meta
        if not isinstance(answer, WorkerMetadata):
            return
        if answer.reset is not None:
            self._pins.rewritten(answer.reset, answer.problem)
            if self._remembering is not None:
                self._remembering.written(answer.problem, answer.warm)
        if self._remembering is not None:
            for report in answer.reports:
                self._remembering.reported(report)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, answer(self._by_hand, request)

    def reset_cache(self) -> bool | None:
        """Nothing: `PinnedBlocks` has heard of it from the pool."""
        return None

    def before_shutdown(self, step: Callable[[], None]) -> None:
        """Save hot prefixes before the workers end; ``step``: an engine step without requests."""
        if self._remembering is not None:
            self._remembering.stop(step)

    def status(self) -> list[dict[str, Any]]:
        """See `vllm_relay.system_kv.status`."""
        return self._pins.status()

    # In the workers.

    def get_handshake_metadata(self) -> None:
        """Write the blocks, once. vLLM 0.33 calls again on wake-up, which a reset covers."""
        self._writer.write_at_start(remember=self._saver is not None)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if connector_metadata.released:
            self._writer.forget()
        if connector_metadata.rewrite is not None:
            reset = connector_metadata.rewrite
            problem = self._writer.rewrite(reset)
            self._answer = WorkerMetadata(reset, problem, warm=self._writer.warm_written)
        if self._saver is not None:
            self._saver.take(connector_metadata.orders)

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER and self._saver is not None:
            self._saver.give_up()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        answer, self._answer = self._answer, None
        if self._saver is not None and (reports := self._saver.reports()):
            answer = answer or WorkerMetadata()
            answer.reports = reports
        return answer

    # Statistics.

    @_or_given_up()
    def get_kv_connector_stats(self) -> SystemKVStats | None:
        """The counts since the last call, in the scheduler."""
        if self.role != KVConnectorRole.SCHEDULER:
            return None
        pins = self._by_hand.counts() if self._by_hand else {}
        hottest = self._remembering.hottest if self._remembering else None
        hot = {} if hottest is None else {HOT: hottest}
        now = SystemKVStats(self._pins.counts() | pins | hot)
        new, self._sent = now.since(self._sent), now
        return None if new.is_empty() else new

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SystemKVStats:
        return SystemKVStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> SystemKVMetrics:
        return SystemKVMetrics(*args, **kwargs)


def _one_group(
    setting: str, on: bool, kv_cache_config: Any, *, speaks: bool
) -> tuple[CacheGroup, int] | None:
    """`only_group` for a setting that needs it; None, with one line, where an engine has none."""
    if not on:
        return None
    try:
        return only_group(kv_cache_config)
    except SystemKVError as error:
        if speaks:
            metrics.say_once(f"system_kv.{setting} is off: {error}")
        return None
