"""Loading of remembered files: blocks are written, given their hashes and freed.

They are cached then like those of any request: nothing waits for them, and cold traffic evicts
them. The first request waits while the files that fit are loaded, one per engine step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_relay import metrics
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.messages import Load, Report
from vllm_relay.system_kv.pinned_blocks import as_request


@dataclass(frozen=True, kw_only=True)
class _Loading:
    """A file being loaded: a request that stands for it, its blocks, how many were cached."""

    path: str
    request: Any
    blocks: list[Any]
    shared: int


def cached_blocks(pool: Any, hashes: Sequence[bytes]) -> list[Any]:
    """The cached blocks at the beginning of a prefix, in a pool with one KV cache group."""
    blocks: list[Any] = []
    for name in hashes:
        if not (found := pool.get_cached_block(name, [0])):
            break
        blocks += found
    return blocks


class WarmStart:
    """The files that are loaded into one block pool.

    Args:
        paths: of files that fit the engine, the hottest first.
    """

    def __init__(self, vllm_config: Any, paths: Sequence[str]) -> None:
        self._vllm_config, self._paths = vllm_config, list(paths)
        self._chosen: list[tuple[str, Any]] = []
        self._loading: _Loading | None = None
        self._files = self._tokens = 0

    def attach(self, pool: Any, blocks: int) -> None:
        """Load into a pool; ``blocks``: that the files may take."""
        self._pool, self._most = pool, blocks

    @property
    def pending(self) -> bool:
        """True while there are files to load."""
        return bool(self._paths or self._chosen or self._loading)

    def order(self) -> Load | None:
        """The order to load the next file, the hottest last: it is evicted last."""
        if self._loading is not None:
            return None
        if self._paths:
            self._chosen, self._paths = self._that_fit(), []
        while self._chosen:
            path, request = self._chosen.pop()
            cached = cached_blocks(self._pool, request.block_hashes)
            count = len(request.block_hashes) - len(cached)
            self._pool.touch(cached)
            if not 0 < count <= self._pool.get_num_free_blocks():
                self._pool.free_blocks(reversed(cached))
                continue
            blocks = [*cached, *self._pool.get_new_blocks(count)]
            self._loading = _Loading(path=path, request=request, blocks=blocks, shared=len(cached))
            ids = tuple(block.block_id for block in blocks)
            return Load(path=path, block_ids=ids, shared=len(cached))
        self._log()
        return None

    def loaded(self, report: Report) -> None:
        """Take the worker's answer to an order."""
        loading = self._loading
        if loading is None or loading.path != report.name:
            return  # given up meanwhile
        self._loading = None
        if report.problem is None:
            self._pool.cache_full_blocks(
                request=loading.request,
                blocks=loading.blocks,
                num_cached_blocks=loading.shared,
                num_full_blocks=len(loading.blocks),
                block_size=self._pool.hash_block_size,
                kv_cache_group_id=0,
            )
            self._files += 1
            self._tokens += (len(loading.blocks) - loading.shared) * self._pool.hash_block_size
        else:
            metrics.say_once(f"remembered prefix not loaded: {report.problem}")
        self._pool.free_blocks(reversed(loading.blocks))
        if not self._chosen:
            self._log()

    def give_up(self) -> None:
        """Load nothing any more."""
        self._paths, self._chosen = [], []
        loading, self._loading = self._loading, None
        if loading is not None:
            self._pool.free_blocks(reversed(loading.blocks))

    def _that_fit(self) -> list[tuple[str, Any]]:
        """The files that fit together, the hottest first, and a request that stands for each."""
        found, room = [], self._most
        for path in self._paths:
            try:
                token_ids = SystemKVFile(path).manifest.token_ids
            except SystemKVError as error:  # another server removed it
                metrics.say_once(f"remembered prefix not loaded: {error}")
                continue
            request = as_request(self._vllm_config, self._pool, path, token_ids, None)
            if (count := len(request.block_hashes)) <= room:
                found.append((path, request))
                room -= count
        return found

    def _log(self) -> None:
        files, self._files = self._files, 0
        if files:
            metrics.logger.info(
                "relay: loaded %d remembered prefix%s: %s tokens",
                files,
                "" if files == 1 else "es",
                f"{self._tokens:,}",
            )
