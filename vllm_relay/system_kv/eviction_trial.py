"""Trial of two eviction orders on the requests that come: is it worth sparing hot prefixes?

Counts alone cannot tell: the turns of a conversation make its history hot until it ends, and then
nobody comes back to it. So two caches of hashes, without KV, serve the same requests.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

# The advantage from which one order is preferred, in caches full of blocks: below it is chance.
_LEAST_LEAD = 0.1


class EvictionTrial:
    """Two caches of ``size`` prefixes: one evicts the least recent, one spares hot prefixes.

    Args:
        size: prefixes in each cache, at least 1.
        half_life: blocks asked for after which an advantage counts half.
        is_hot: True for a prefix to spare.
    """

    def __init__(self, *, size: int, half_life: int, is_hot: Callable[[bytes], bool]) -> None:
        self._size, self._half_life, self._is_hot = size, half_life, is_hot
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._sparing: OrderedDict[bytes, None] = OrderedDict()
        self._lead = 0.0

    @property
    def sparing_wins(self) -> bool:
        """True if the cache that spares hot prefixes has found more of late."""
        return self._lead > _LEAST_LEAD * self._size

    def ask(self, hashes: Sequence[bytes]) -> None:
        """Serve one request from both; ``hashes``: of its prompt's blocks, from the first on."""
        self._lead *= 2 ** (-len(hashes) / self._half_life)
        self._lead += _found(self._sparing, hashes) - _found(self._recent, hashes)
        for cache in (self._recent, self._sparing):
            for name in reversed(hashes):  # the end of a prompt is evicted before its beginning
                cache[name] = None
                cache.move_to_end(name)
        while len(self._recent) > self._size:
            self._recent.popitem(last=False)
        moves = len(self._sparing)  # each once: if all are hot, the least recent goes
        while len(self._sparing) > self._size:
            name, _ = self._sparing.popitem(last=False)
            if moves > 0 and self._is_hot(name):
                self._sparing[name] = None
            moves -= 1


def _found(cache: OrderedDict[bytes, None], hashes: Sequence[bytes]) -> int:
    """The blocks at the beginning of a prompt that are cached."""
    return next((i for i, name in enumerate(hashes) if name not in cache), len(hashes))
