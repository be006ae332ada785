"""The scheduler's side of ``remember``: which prefixes are saved, and when.

A round begins every few minutes, and when the engine stops. Its prefixes are saved one after
another, the hottest first. Their blocks are referenced while the workers copy them, so that nothing
evicts them, and are given back as soon as a request may wait for blocks.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm_relay import metrics
from vllm_relay.system_kv.file import SystemKVError
from vllm_relay.system_kv.known_prefixes import KnownPrefixes, Prefix, is_plain
from vllm_relay.system_kv.messages import Answers, Orders, Report, Save
from vllm_relay.system_kv.placement import Placement
from vllm_relay.system_kv.remembered_files import Round, file_name
from vllm_relay.system_kv.retention import Retention
from vllm_relay.system_kv.stats import PLACES
from vllm_relay.system_kv.switched_off import or_off
from vllm_relay.system_kv.warm_start import WarmStart, cached_blocks

# Seconds between two rounds; that a round may take while the engine stops, and one of its files
# while a request waits for the round.
ROUND_SECONDS = 300.0
_STOP_SECONDS = 60.0
# Seconds until a file is given up whose blocks are copied.
_WRITE_SECONDS = 600.0
# A prefix is saved from this count on: three requests came under it of late.
_LEAST_COUNT = 2.0
# Blocks compared in a round: it is done between two engine steps.
_MOST_BLOCKS = 4096
# Blocks are held while this share of the pool is free.
_FREE_SHARE = 1 / 16


class Remembering:
    """Saves hot prefixes of one block pool with one KV cache group.

    ``off`` is the reason why it ended, or None; ``hottest`` the decayed count of requests and the
    tokens of the hottest prefixes, the hottest first, or None before the first round.

    Args:
        block_size: tokens of a KV block. most_saved: blocks that may be in files.
        identity: the fields of the engine's `Identity`.
        warm: what is loaded at start.
    """

    title, counted = "system_kv.remember", "remembering"
    after = "nothing is saved any more"

    def __init__(
        self,
        vllm_config: Any,
        *,
        block_size: int,
        most_saved: int,
        identity: Mapping[str, Any],
        warm: WarmStart,
    ) -> None:
        self.off: str | None = None
        self.hottest: list[list[float]] | None = None
        self._block_size, self._identity = block_size, identity
        self._most_saved = min(most_saved, _MOST_BLOCKS)
        self.warm = warm
        self._to_save: list[Prefix] = []
        self._saving: str | None = None
        self._held: list[Any] = []
        self._since = 0.0  # the newest order or copy
        self._drop = self._compare = self._at_once = False
        self._answers = Answers(vllm_config.parallel_config.world_size)
        self._waiting: set[str] = set()
        # The newest round and the one before; by request, the number of the round it waits for, and
        # until when.
        self._round, self._before = Round(0), Round(0)
        self._asked: dict[str, tuple[int, float]] = {}
        self._next_round = time.monotonic() + ROUND_SECONDS
        self._pool: Any = None

    @or_off
    def attach(
        self,
        pool: Any,
        retention: Retention,
        pinned: Callable[[], list[Prefix]] = list,
    ) -> None:
        """Begin with a pool whose pinned blocks are taken.

        Args:
            pool: vLLM's BlockPool.
            retention: attached to the pool; it counts.
            pinned: prefixes pinned by hand, which are saved before hot ones.
        """
        if pool.hash_block_size != self._block_size:
            raise SystemKVError(f"blocks of {self._block_size} tokens have several hashes")
        self._retention, self._pinned = retention, pinned
        self._known = KnownPrefixes(block_size=self._block_size, most=retention.most)
        self.warm.attach(pool)
        self._pool = pool

    # Requests.

    def asks(self, request: Any) -> None:
        """Note a request that vLLM would schedule: it may wait for blocks."""
        self._waiting.add(request.request_id)

    @or_off
    def written(self, problem: str | None, files: frozenset[tuple[str, Placement]]) -> None:
        """Take the workers' answer to the first request, see `WarmStart.written`."""
        if problem is not None:
            self._compare = True
        self.warm.written(problem, files)

    def saves(self, request: Any) -> bool:
        """True while a request waits for a round that begins after it came."""
        now = time.monotonic()
        if request.request_id not in self._asked:
            # Expired entries of aborted requests are dropped.
            self._asked = {k: asked for k, asked in self._asked.items() if now < asked[1]}
            self._asked[request.request_id] = self._round.number + 1, now + _STOP_SECONDS
            self._next_round = now
        wanted, until = self._asked[request.request_id]
        if self.off is not None or not (self._busy or self._round.number < wanted):
            return False
        if now >= until:
            self.give_back(f"the next took more than {_STOP_SECONDS:.0f} s")
        return now < until

    def saved(self) -> list[str]:
        """Names of the files of the round that ended last.

        Raises SystemKVError with the reason if the round ended early, or nothing is saved any more.
        """
        if self.off is not None:
            raise SystemKVError(f"{self.title} is off: {self.off}")
        ended = self._before if self._busy else self._round
        if ended.problem is not None:
            raise SystemKVError(f"{len(ended.names)} files were saved; {ended.problem}")
        return list(ended.names)

    @property
    def _busy(self) -> bool:
        """True while a round is under way."""
        return bool(self._saving or self._to_save)

    @or_off
    def begins(self, request: Any) -> None:
        """Note a request that has its blocks, and the prefix it came under."""
        self._waiting.discard(request.request_id)
        self._asked.pop(request.request_id, None)
        if request.num_preemptions == 0 and is_plain(request):
            self._known.add(request.block_hashes, request.prompt_token_ids)

    # Steps.

    def orders(self, scheduler_output: Any) -> Orders | None:
        """The message for the workers of this step."""
        waiting, self._waiting = self._waiting, set()
        found: list[Orders] = []
        self._order(bool(waiting or scheduler_output.preempted_req_ids), found.append)
        if self.off is not None:
            self._let_go()
        drop, self._drop = self._drop, False
        if found:
            return replace(found[0], drop=drop)
        return Orders(drop=True) if drop else None

    @or_off
    def _order(self, starved: bool, give: Callable[[Orders], None]) -> None:
        scarce = not self._at_once and self._pool.get_num_free_blocks() < _FREE_SHARE * len(
            self._pool.blocks
        )
        if self._held and (starved or scarce):
            self.give_back()
        save = None
        if time.monotonic() >= self._next_round and not self._busy:
            self._begin_round()
        if self._saving and not self._held and time.monotonic() > self._since + _WRITE_SECONDS:
            self.give_back(
                f"no file came in {_WRITE_SECONDS:.0f} s: do all workers see the folder?"
            )
        compare = self._compare and self._saving is None and bool(self._to_save)
        if self._to_save and not (self._saving or self._compare or scarce):
            save = self._save()
        if save or compare or self._at_once:
            orders = Orders(save=save, compare=compare, at_once=self._at_once)
            if save or compare:
                self._saving, self._since = orders.key, time.monotonic()
            give(orders)

    @or_off
    def reported(self, report: Report) -> None:
        """Take a worker's answer."""
        # One to an order that was given up says nothing of the next.
        if report.key != self._saving or not self._answers.complete(report):
            return
        if report.what == "compared":
            self._saving = None
            self._compare = False
            if report.problem is not None:
                raise SystemKVError(report.problem)
        else:
            self._release()
            self._since = time.monotonic()
            if report.what == "saved":
                self._saving = None
                self._drop = True  # what other workers still do for it
                if report.problem is None:
                    self._round.names.append(report.name)
                    until = time.monotonic() + _STOP_SECONDS
                    self._asked = {k: (number, until) for k, (number, _) in self._asked.items()}
            if report.problem is not None:
                self._to_save.clear()
                self._round.problem = report.problem
                metrics.say_once(f"system_kv.remember: nothing was saved: {report.problem}")

    def give_back(self, why: str = "requests needed KV blocks") -> None:
        """Give the held blocks back; a round under way ends early."""
        if self._held or self._saving:
            self._drop = True
        if self._busy:
            self._round.problem = why
        self._saving = None
        self._to_save.clear()
        self._release()

    def _let_go(self) -> None:
        """Hold no block, and load nothing any more."""
        self.give_back("the prefix cache was reset")
        self.warm.give_up()

    def before_reset(self) -> None:
        """Hold no block while vLLM resets its prefix cache; other weights may follow."""
        if self.off is None and self._pool is not None:
            self._let_go()
            self._compare = True

    @or_off
    def stop(self, step: Callable[[], None]) -> None:
        """Save what is hot now; ``step``: an engine step without requests."""
        if self._pool is None or self._at_once:
            return
        self._at_once = True
        if not self._busy:
            self._begin_round()
        deadline = time.monotonic() + _STOP_SECONDS
        while self._busy and time.monotonic() < deadline:
            step()

    # Saving.

    def _begin_round(self) -> None:
        now = time.monotonic()
        self._next_round = now + ROUND_SECONDS
        counts = self._retention.hotness.hottest(_LEAST_COUNT, self._most_saved)
        self._before, self._round = self._round, Round(self._round.number + 1)
        pinned, room, left = [], self._most_saved, 0
        for prefix in self._pinned():
            if len(prefix.hashes) <= room:
                pinned.append(prefix)
                room -= len(prefix.hashes)
            else:
                left += 1
        if left:
            self._round.problem = f"{left} pinned prefixes do not fit into remember_gib"
        hot = self._known.choose(counts, room)
        self.hottest = [
            [round(counts[prefix.hashes[-1]], 1), len(prefix.token_ids)] for prefix in hot[:PLACES]
        ]
        self._to_save = [*pinned, *(prefix for prefix in hot if prefix not in pinned)]
        self._hot_at = time.time()

    def _save(self) -> Save | None:
        """The order to save the next prefix that is cached; its blocks are held."""
        while self._to_save:
            prefix = self._to_save.pop(0)
            self._hot_at -= 1.0
            blocks = cached_blocks(self._pool, prefix.hashes)
            if len(blocks) < len(prefix.hashes):
                continue
            self._pool.touch(blocks)
            self._held = blocks
            return Save(
                name=file_name(self._identity, prefix.token_ids),
                token_ids=prefix.token_ids,
                block_ids=tuple(block.block_id for block in blocks),
                hot_at=self._hot_at,
            )
        return None

    def _release(self) -> None:
        held, self._held = self._held, []
        if held:
            self._pool.free_blocks(reversed(held))
