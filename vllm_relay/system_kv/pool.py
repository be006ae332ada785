"""The scheduler's side: system KVs in the block pool, referenced so that nothing evicts them."""

import inspect
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from vllm_relay import metrics
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.pins import budget_error, place


class PinnedBlocks:
    """The blocks of all system KVs in one block pool.

    They are taken when the pool is new, so their ids are those of `place` and the workers need no
    message. Their hashes are put into the pool's prefix cache when the first request comes: only
    then has every vLLM version fixed the seed of its hashes.

    A reset of the prefix cache forgets the hashes but not the blocks. It may follow a change of the
    weights, or the loss of the cache's memory (sleep), so the hashes come back only when the
    workers have looked at their weights and written the blocks again: `wants_rewrite`, `rewritten`.

    Args:
        vllm_config: vLLM's VllmConfig. files: what is loaded. block_size: tokens per block.
        budget: the share of the pool they may take.
    """

    def __init__(
        self,
        vllm_config: Any,
        files: Sequence[SystemKVFile],
        block_size: int,
        budget: float,
    ) -> None:
        self._vllm_config = vllm_config
        self._files = files
        self._names = _unique([file.manifest.name for file in files])
        self._block_size = block_size
        self._budget = budget
        self._placements = place([f.manifest.token_ids for f in files], block_size)
        self._pool: Any = None
        self._blocks: list[Any] = []
        self._registered = False
        # A change of the weights may come with each reset, so each wants its own answer.
        self._resets = self._written = 0
        self.released: str | None = None
        self.requests = [0] * len(files)
        self.tokens = [0] * len(files)

    def take(self, pool: Any) -> None:
        """Take the blocks from a pool that nobody has used yet.

        Raises:
            SystemKVError: over the budget, or another connector took blocks first.
        """
        count = len({id for placement in self._placements for id in placement.block_ids})
        for file, placement in zip(self._files, self._placements, strict=True):
            if not placement.block_ids:
                raise SystemKVError(
                    f"{file.path}: has {file.manifest.tokens} tokens, less than one KV block of "
                    f"{self._block_size}"
                )
        longest = self._vllm_config.model_config.max_model_len
        usable = pool.get_num_free_blocks()
        error = budget_error(count, usable, self._budget, longest, self._block_size)
        if error is not None:
            raise SystemKVError(error)
        self._pool = pool
        self._blocks = pool.get_new_blocks(count)
        if [block.block_id for block in self._blocks] != list(range(1, count + 1)):
            raise SystemKVError("system KVs need the first blocks of the KV cache; they are taken")
        self._watch_resets(pool)

    def _watch_resets(self, pool: Any) -> None:
        """Let the pool reset its prefix cache although our blocks are in use, and note it.

        vLLM refuses a reset while a block is referenced. Wrapped on this one object: there is no
        hook, and a connector's ``reset_cache`` is called on some ways only.
        """
        stock = pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            pool.num_gpu_blocks -= len(self._blocks)
            try:
                done = bool(stock())
            finally:
                pool.num_gpu_blocks += len(self._blocks)
            if done and self._blocks:
                self._registered = False
                self._resets += 1
            return done

        pool.reset_prefix_cache = reset_prefix_cache

    def register(self) -> None:
        """Put the blocks' hashes into the pool's prefix cache, unless they are there."""
        if self._registered or self.wants_rewrite is not None or not self._blocks:
            return
        self._registered = True
        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        more = {}
        if "num_hash_lookahead_tokens" in inspect.signature(get_request_block_hasher).parameters:
            more["num_hash_lookahead_tokens"] = self._vllm_config.num_hash_lookahead_tokens
        hasher = get_request_block_hasher(
            self._pool.hash_block_size, get_hash_fn_by_name(algorithm), **more
        )
        for file, placement in zip(self._files, self._placements, strict=True):
            request = Request(
                request_id=f"system-kv-{file.manifest.name}",
                prompt_token_ids=list(file.manifest.token_ids),
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                block_hasher=hasher,
            )
            self._pool.cache_full_blocks(
                request=request,
                blocks=[self._blocks[block_id - 1] for block_id in placement.block_ids],
                num_cached_blocks=placement.shared,
                num_full_blocks=len(placement.block_ids),
                block_size=self._block_size,
                kv_cache_group_id=0,
            )

    @property
    def wants_rewrite(self) -> int | None:
        """The number of the reset after which the workers must write again; None for none."""
        return self._resets if self._blocks and self._written != self._resets else None

    def rewritten(self, reset: int, problem: str | None) -> None:
        """The workers wrote the blocks again after a reset, or say why they must not be used."""
        if reset != self._resets or not self._blocks:
            return  # there was another one meanwhile
        self._written = reset
        if problem is None:
            self.register()
            return
        self.released = problem
        blocks, self._blocks = self._blocks, []
        self._pool.free_blocks(blocks)
        metrics.logger.warning(
            "relay: system KVs are not used any more: %s; their %d blocks are free. A restart "
            "loads them again if they fit",
            problem,
            len(blocks),
        )

    def count_hit(self, block_ids: Sequence[int]) -> None:
        """Count a request that begins in these blocks for the prompt it has most of."""
        best, have = -1, 0
        for i, placement in enumerate(self._placements):
            same = 0
            for ours, theirs in zip(placement.block_ids, block_ids, strict=False):
                if ours != theirs:
                    break
                same += 1
            if same > have:
                best, have = i, same
        if have and self._blocks:
            self.requests[best] += 1
            self.tokens[best] += have * self._block_size

    def counts(self) -> dict[str, dict[str, int]]:
        """Per prompt the counters and the blocks pinned; cheap enough for every step."""
        held = bool(self._blocks)
        return {
            name: {
                "requests_hit": self.requests[i],
                "tokens_hit": self.tokens[i],
                "blocks": len(self._placements[i].block_ids) if held else 0,
            }
            for i, name in enumerate(self._names)
        }

    def status(self) -> list[dict[str, Any]]:
        """One dictionary per prompt, see `vllm_relay.system_kv.status`."""
        return [
            {
                "name": self._names[i],
                "path": str(file.path),
                "tokens": file.manifest.tokens,
                "blocks": len(placement.block_ids) if self._blocks else 0,
                "tokens_pinned": len(placement.block_ids) * self._block_size if self._blocks else 0,
                "block_ids": list(placement.block_ids) if self._blocks else [],
                "cached": self._blocks != []
                and all(
                    self._blocks[block_id - 1].block_hash is not None
                    for block_id in placement.block_ids
                ),
                "requests_hit": self.requests[i],
                "tokens_hit": self.tokens[i],
                "released": self.released,
            }
            for i, (file, placement) in enumerate(zip(self._files, self._placements, strict=True))
        ]


def _unique(names: Sequence[str]) -> list[str]:
    """Names that tell prompts apart: the second ``acme`` is ``acme-2``."""
    seen: list[str] = []
    for name in names:
        count = 1
        while (wanted := name if count == 1 else f"{name}-{count}") in seen:
            count += 1
        seen.append(wanted)
    return seen
