"""The scheduler's side: system KVs in the block pool, referenced so that nothing evicts them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_relay import compat, metrics
from vllm_relay.config import SystemKVConfig
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.placement import (
    CacheGroup,
    Placement,
    alignment,
    budget_error,
    pinned_ids,
)

if TYPE_CHECKING:
    from vllm_relay.system_kv.pins import Pins


def as_request(
    vllm_config: Any, pool: Any, name: str, token_ids: Sequence[int], salt: str | None
) -> Any:
    """A request that stands for a file: the pool caches blocks under its hashes."""
    return Request(
        request_id=f"system-kv-{name}",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=compat.block_hasher(vllm_config, pool.hash_block_size),
    )


class PinnedBlocks:
    """The blocks of all system KVs in one block pool, of all KV cache groups.

    They are taken while the pool is new, so their ids are those of `place` and the workers need no
    message. Their hashes enter the pool's prefix cache with the first request: only then has every
    vLLM version fixed the seed of its hashes.

    A reset of the prefix cache forgets the hashes but not the blocks. New weights or the loss of
    the cache's memory (sleep) may come with it, so the hashes return only after the workers have
    compared their weights and written the blocks again: `wants_rewrite`, `rewritten`. The first
    request counts as reset 0: its workers compare their weights, too.

    ``salts`` are the ``cache_salt`` of each file, ``placements`` its blocks by group; ``longest``
    the blocks that one request of ``max_model_len`` takes.
    """

    def __init__(
        self,
        vllm_config: Any,
        files: Sequence[SystemKVFile],
        salts: Sequence[str | None],
        placements: Sequence[tuple[Placement, ...]],
        groups: Sequence[CacheGroup],
        longest: int,
        settings: SystemKVConfig,
    ) -> None:
        self._vllm_config = vllm_config
        self._files = files
        self._salts = salts
        self._placements = placements
        self._names = _unique([file.manifest.name for file in files])
        opaque = _unique([file.seal[:8] for file in files])
        self._labels = self._names if settings.metric_names else opaque
        self._groups = groups
        self._longest = longest
        # The group in which hits are counted: under full attention a hit is a run of blocks.
        self._counted = next((i for i, group in enumerate(groups) if group.window is None), 0)
        self._budget = settings.budget
        self._count = [len(pinned_ids([placed])) for placed in placements]
        self._pool: Any = None
        self._blocks: list[Any] = []
        # Each reset may come with other weights, so each wants an answer of its own.
        self._resets, self._written = 0, -1
        self.released: str | None = None
        self._requests_hit = [0] * len(files)
        self._tokens_hit = [0] * len(files)

    def take(
        self,
        pool: Any,
        before_reset: Callable[[], None] | None = None,
        pins: "Pins | None" = None,
    ) -> None:
        """Take the blocks from a pool that nobody has used yet.

        Args:
            before_reset: called before each reset of the prefix cache.
            pins: given up by a reset.

        Raises:
            SystemKVError: over the budget, or another connector took blocks first.
        """
        count = len(pinned_ids(self._placements))
        for file, placed in zip(self._files, self._placements, strict=True):
            if not placed[self._counted].block_ids:
                raise SystemKVError(
                    f"{file.path}: has {file.manifest.tokens} tokens, less than one KV block of "
                    f"{alignment(self._groups)}"
                )
        longest = self._vllm_config.model_config.max_model_len
        usable = pool.get_num_free_blocks()
        error = budget_error(count, usable, self._budget, longest, self._longest)
        if error is not None:
            raise SystemKVError(error)
        self._pool = pool
        self._blocks = pool.get_new_blocks(count)
        if [block.block_id for block in self._blocks] != list(range(1, count + 1)):
            raise SystemKVError("system KVs need the first blocks of the KV cache; they are taken")

        def pinned() -> int:
            if before_reset is not None:
                before_reset()
            return len(self.block_ids() | (pins.block_ids() if pins else set()))

        def note_reset() -> None:
            self._resets += 1
            if pins is not None:
                pins.release()

        compat.allow_resets(pool, pinned, note_reset)

    def block_ids(self) -> set[int]:
        """All pinned blocks."""
        return {block.block_id for block in self._blocks}

    def _register(self) -> None:
        """Put the blocks' hashes into the pool's prefix cache."""
        null = self._pool.null_block
        for file, salt, placed in zip(self._files, self._salts, self._placements, strict=True):
            manifest = file.manifest
            request = as_request(
                self._vllm_config, self._pool, manifest.name, manifest.token_ids, salt
            )
            for number, (group, placement) in enumerate(zip(self._groups, placed, strict=True)):
                blocks = [self._blocks[i - 1] if i else null for i in placement.block_ids]
                self._pool.cache_full_blocks(
                    request=request,
                    # A null block is left out; so is one that an earlier prompt gave its hash.
                    blocks=[null if block.block_hash is not None else block for block in blocks],
                    num_cached_blocks=placement.shared,
                    num_full_blocks=len(blocks),
                    block_size=group.block_size,
                    kv_cache_group_id=number,
                )

    @property
    def wants_rewrite(self) -> int | None:
        """The number of the reset after which the workers must write again, or None."""
        return self._resets if self._blocks and self._written != self._resets else None

    def rewritten(self, reset: int, problem: str | None) -> None:
        """Take the workers' answer to a reset: written again, or why the KV must not be used."""
        if reset != self.wants_rewrite:
            return  # another reset came meanwhile
        self._written = reset
        if problem is None:
            self._register()
        else:
            self._release(problem)

    def failed(self, error: Exception) -> None:
        """Give the system KVs up after a failure on this side; the engine goes on without them."""
        if self.released is None:
            metrics.count_fallback("loading")
            self._release(" ".join(f"{type(error).__name__}: {error}".split()))

    def _release(self, reason: str) -> None:
        self.released = reason
        blocks, self._blocks = self._blocks, []
        metrics.logger.warning(
            "relay: system KVs are not used any more: %s; their %d blocks are free. A restart "
            "loads them again if they fit",
            reason,
            len(blocks),
        )
        self._pool.free_blocks(blocks)

    def count_hit(self, blocks: Sequence[Sequence[Any]]) -> None:
        """Count a request with these blocks, by group, for the prompt it shares most of."""
        if not self._blocks:
            return
        ids = [block.block_id for block in blocks[self._counted]]
        have = [hit_length(placed[self._counted].block_ids, ids) for placed in self._placements]
        if most := max(have, default=0):
            best = have.index(most)
            self._requests_hit[best] += 1
            self._tokens_hit[best] += most * self._groups[self._counted].block_size

    def counts(self) -> dict[str, dict[str, int]]:
        """Counters and pinned blocks by label; cheap enough for every step."""
        return {
            label: {
                "requests_hit": self._requests_hit[i],
                "tokens_hit": self._tokens_hit[i],
                "blocks": self._count[i] if self._blocks else 0,
            }
            for i, label in enumerate(self._labels)
        }

    def status(self) -> list[dict[str, Any]]:
        """One dictionary per prompt, see `vllm_relay.system_kv.status`."""
        found: list[dict[str, Any]] = []
        counted = self.counts().items()
        for name, (label, counts), file, placed in zip(
            self._names, counted, self._files, self._placements, strict=True
        ):
            ids = sorted(pinned_ids([placed])) if self._blocks else []
            columns = len(placed[self._counted].block_ids) if self._blocks else 0
            hashes = [self._blocks[block_id - 1].block_hash for block_id in ids]
            entry: dict[str, Any] = {"name": name, "label": label, "path": str(file.path)}
            entry |= {"tokens": file.manifest.tokens, **counts}
            entry["tokens_pinned"] = columns * self._groups[self._counted].block_size
            entry["block_ids"] = ids
            entry["cached"] = bool(hashes) and None not in hashes
            entry["released"] = self.released
            found.append(entry)
        return found


def hit_length(pinned: Sequence[int], held: Sequence[int]) -> int:
    """Columns up to the last in which a request holds the pinned block; 0 is the null block."""
    columns = range(min(len(pinned), len(held)), 0, -1)
    return next((i for i in columns if pinned[i - 1] == held[i - 1] != 0), 0)


def _unique(names: Sequence[str]) -> list[str]:
    """Distinct names: the second ``acme`` becomes ``acme-2``."""
    seen: list[str] = []
    for name in names:
        count = 1
        while (wanted := name if count == 1 else f"{name}-{count}") in seen:
            count += 1
        seen.append(wanted)
    return seen
