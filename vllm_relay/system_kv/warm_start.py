"""Loading of remembered files at start: blocks are written, given their hashes and freed.

The scheduler and the workers choose the files and their blocks by themselves, from the same folder.
The workers write the blocks before the engine is ready. With the first request they compare their
weights and say what they have written; the blocks then get their hashes and are freed. They are
cached like those of any request: nothing waits for them, and cold traffic evicts them.
"""

from collections.abc import Sequence
from typing import Any

from vllm_relay import metrics
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.pinned_blocks import as_request
from vllm_relay.system_kv.placement import CacheGroup, Placement, Placer


def cached_blocks(pool: Any, hashes: Sequence[bytes]) -> list[Any]:
    """The cached blocks at the beginning of a prefix, in a pool with one KV cache group."""
    blocks: list[Any] = []
    for name in hashes:
        if not (found := pool.get_cached_block(name, [0])):
            break
        blocks += found
    return blocks


def choose(
    paths: Sequence[str],
    pinned: Sequence[Sequence[int]],
    salts: Sequence[str | None],
    group: CacheGroup,
    room: int,
    *,
    speaks: bool,
) -> list[tuple[SystemKVFile, Placement]]:
    """The files that fit, with pinned prompts, into ``room`` blocks; and their blocks.

    Args:
        paths: of remembered files, the hottest first.
        pinned: token ids of the prompts that are placed before them. salts: of each.
        speaks: say in the log what cannot be read.
    """
    placer, found = Placer([group]), []
    for tokens, salt in zip(pinned, salts, strict=True):
        placer.add(tokens, salt)
    for path in paths:
        try:
            file = SystemKVFile(path)
        except (SystemKVError, MemoryError, RuntimeError) as error:  # another server removed it
            if speaks:
                metrics.say_once(f"remembered prefix not loaded: {error}")
            continue
        placed = placer.add(file.manifest.token_ids, None, room)
        if placed is not None and len(placed[0].block_ids) > placed[0].shared:
            found.append((file, placed[0]))
    return found


class WarmStart:
    """The chosen files of one block pool, until the first request."""

    def __init__(self, vllm_config: Any, chosen: Sequence[tuple[SystemKVFile, Placement]]) -> None:
        self._vllm_config, self._files = vllm_config, list(chosen)
        self._chosen: list[tuple[SystemKVFile, Placement]] = []  # whose blocks are taken

    def attach(self, pool: Any) -> None:
        """Take the blocks. Raises SystemKVError if somebody has taken them before."""
        self._pool = pool
        wanted = [i for _, placed in self._files for i in placed.block_ids[placed.shared :]]
        blocks = pool.get_new_blocks(len(wanted))
        if [block.block_id for block in blocks] != wanted:
            pool.free_blocks(blocks)
            raise SystemKVError("remembered prefixes need the first blocks; they are taken")
        self._chosen = self._files

    @property
    def pending(self) -> bool:
        """True while blocks are taken: their weights are still to be compared."""
        return bool(self._chosen)

    def written(self, problem: str | None, files: frozenset[tuple[str, Placement]]) -> None:
        """Take the workers' answer: why nothing may be used, or seal and blocks of each written."""
        if problem is not None and self._chosen:
            metrics.say_once(f"remembered prefixes not loaded: {problem}")
        try:
            for file, placement in self._chosen if problem is None else ():
                if (file.seal, placement) in files:
                    self._register(file, placement)
        finally:  # requests wait while blocks are taken
            self.give_up()

    def give_up(self) -> None:
        """Free the blocks, the hottest last: they are evicted last."""
        chosen, self._chosen, self._files = self._chosen, [], []
        for _, placement in reversed(chosen):
            ids = placement.block_ids[placement.shared :]
            self._pool.free_blocks(self._pool.blocks[i] for i in reversed(ids))

    def _register(self, file: SystemKVFile, placement: Placement) -> None:
        """Put the blocks' hashes into the pool's prefix cache."""
        request = as_request(
            self._vllm_config, self._pool, str(file.path), file.manifest.token_ids, None
        )
        before = request.block_hashes[: placement.shared]
        if len(cached_blocks(self._pool, before)) < placement.shared:
            return  # the file that they are of was not written
        self._pool.cache_full_blocks(
            request=request,
            blocks=[self._pool.blocks[i] for i in placement.block_ids],
            num_cached_blocks=placement.shared,
            num_full_blocks=len(placement.block_ids),
            block_size=self._pool.hash_block_size,
            kv_cache_group_id=0,
        )
