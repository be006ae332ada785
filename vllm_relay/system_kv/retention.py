"""Retention of hot prefixes: their free blocks are moved to the end of vLLM's eviction queue.

The blocks stay free. vLLM counts them as such and takes them when no others are left, so no
request waits for them.
"""

from collections.abc import Sequence
from typing import Any

from vllm_relay import compat, metrics
from vllm_relay.patching import target
from vllm_relay.system_kv.eviction_trial import EvictionTrial
from vllm_relay.system_kv.hotness import Hotness
from vllm_relay.system_kv.switched_off import or_off

# In blocks of the pool. Long against the time that a block stays cached: a prefix that was evicted
# is known when it returns.
_HALF_LIFE = 8
_REMEMBERED = 4
# In blocks of the pool, too.
_TRIAL_HALF_LIFE = 4
# Blocks moved per engine step at most, each in a few microseconds.
MOVES_PER_STEP = 512


class Retention:
    """Keeps the KV of hot prefixes in one block pool while colder blocks can be evicted.

    ``off`` is the reason why it ended, or None; ``hotness`` the counts, of up to ``most`` prefixes.
    """

    title, counted = "system_kv.learn", "learning"
    after = "the KV cache evicts as without it"

    def __init__(self) -> None:
        self.off: str | None = None
        self._moves_left = MOVES_PER_STEP

    @or_off
    def attach(self, pool: Any, blocks: int, block_sizes: Sequence[int]) -> None:
        """Begin with a pool whose pinned blocks are taken.

        Args:
            pool: vLLM's BlockPool.
            blocks: that hot prefixes may take.
            block_sizes: tokens of a block, by KV cache group; a prefix has blocks in each.
        """
        # Blocks of all groups for one hash, which may be of a part of a block.
        per_hash = sum(pool.hash_block_size / size for size in block_sizes)
        size = max(1, int(len(pool.blocks) / per_hash))
        self.most = _REMEMBERED * size
        self.hotness = Hotness(
            capacity=int(blocks / per_hash), half_life=_HALF_LIFE * size, most=self.most
        )
        self._trial = EvictionTrial(
            size=size, half_life=_TRIAL_HALF_LIFE * size, is_hot=self.hotness.is_hot
        )
        self._hash_of = target("vllm.v1.core.kv_cache_utils:get_block_hash")
        self._pool, self._queue = pool, pool.free_block_queue
        head = self._queue.fake_free_list_head
        # All that is used later: a pool that lacks one is left as it is.
        _ = self._queue.remove, self._queue.append, self._queue.num_free_blocks
        _ = head.block_hash, head.next_free_block, pool.cached_block_hash_to_block.get_one_block
        compat.before_eviction(pool, self.spare)
        metrics.logger.info(
            "relay: system_kv.learn: hot prefixes may stay in %s of %s KV cache blocks",
            f"{blocks:,}",
            f"{len(pool.blocks) - 1:,}",
        )

    @or_off
    def ask(self, hashes: Sequence[bytes]) -> None:
        """Count one request; ``hashes``: vLLM's ``BlockHash`` of each full block of its prompt."""
        self._trial.ask(hashes)
        self.hotness.ask(hashes)

    @or_off
    def begin_step(self) -> None:
        """Allow the moves of the next engine step."""
        self._moves_left = MOVES_PER_STEP

    @or_off
    def spare(self, num_blocks: int) -> None:
        """Move hot blocks to the queue's end that are among the next ``num_blocks`` evicted."""
        if not self._trial.sparing_wins:
            return
        block = self._queue.fake_free_list_head.next_free_block
        # Each block once: those that were moved are not looked at again.
        for _ in range(self._queue.num_free_blocks):
            if num_blocks <= 0 or self._moves_left <= 0:
                return
            following = block.next_free_block
            if self._is_hot(block):
                self._queue.remove(block)
                self._queue.append(block)
                self._moves_left -= 1
            else:
                num_blocks -= 1
            block = following

    def _is_hot(self, block: Any) -> bool:
        key = block.block_hash
        if key is None or not self.hotness.is_hot(self._hash_of(key)):
            return False
        # Requests that came at the same time leave copies; vLLM finds one of them.
        return self._pool.cached_block_hash_to_block.get_one_block(key) is block
