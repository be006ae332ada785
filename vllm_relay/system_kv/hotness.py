"""Hotness of prefixes: a decayed count of the requests that came under each, in bounded memory.

A prefix is named by the hash of its last full KV block. vLLM chains these hashes, so a name stands
for all tokens before it, and what many prompts have in common collects the counts of all of them.
"""

import math
from collections.abc import Sequence

# Levels per doubling of a count: the hottest prefixes are found to 1/64 of a half-life.
_LEVELS = 64
# A count from which a prefix may be hot: a second request came before the first was forgotten.
_LEAST_COUNT = 1.25


class Hotness:
    """Decayed counts by prefix, and which prefixes are the hottest that fit.

    A request counts 1 for every prefix of its prompt, and 1/2 after ``half_life`` more blocks were
    asked for. Kept is ``log2(sum of 2 ** t)`` over the times ``t`` of its requests, in half-lives:
    a score that only a request changes, in the order of the counts. Prefixes lie in levels by
    score, so that the coldest is found without a search.

    Args:
        capacity: blocks that may be hot at a time.
        half_life: blocks asked for after which a count is halved, at least 1.
        most: prefixes that are remembered, at least 1; the coldest are forgotten first.
    """

    def __init__(self, *, capacity: int, half_life: int, most: int) -> None:
        self._capacity, self._half_life, self._most = capacity, half_life, most
        self._asked = 0
        self._scores: dict[bytes, float] = {}
        self._levels: dict[int, dict[bytes, None]] = {}
        self._coldest = 0
        # The level from which prefixes are hot; found anew every `_interval` blocks.
        self._hot_from: float = math.inf
        self._found_at, self._interval = 0, max(1, most // 64)

    def __len__(self) -> int:
        """The number of prefixes remembered."""
        return len(self._scores)

    def ask(self, hashes: Sequence[bytes]) -> None:
        """Count one request; ``hashes``: of the full blocks of its prompt, from the first on."""
        # The first block last: of one prompt, the beginning is hotter than the end.
        for name in reversed(hashes):
            self._asked += 1
            now = self._asked / self._half_life
            score = self._scores.get(name)
            if score is None:
                score = now
            else:
                self._leave(name, score)
                score = now + math.log2(1 + 2 ** (score - now))
            self._scores[name] = score
            level = math.floor(score * _LEVELS)
            self._coldest = min(self._coldest, level) if self._levels else level
            self._levels.setdefault(level, {})[name] = None
            if len(self._scores) > self._most:
                self._forget_coldest()
        if self._asked - self._found_at >= self._interval:
            self._found_at = self._asked
            self._find_hottest()

    def count(self, name: bytes) -> float:
        """The decayed count of a prefix; 0 if it is not remembered."""
        score = self._scores.get(name)
        return 0.0 if score is None else 2 ** (score - self._asked / self._half_life)

    def hottest(self, least: float, most: int) -> dict[bytes, float]:
        """Counts of the hottest prefixes, ``most`` at most, of those with ``least`` or more."""
        found: dict[bytes, float] = {}
        for level in sorted(self._levels, reverse=True):
            for name in self._levels[level]:
                count = self.count(name)
                if count < least or len(found) >= most:
                    return found
                found[name] = count
        return found

    def is_hot(self, name: bytes) -> bool:
        """True for the hottest prefixes, as many as fit, that more than one request came under."""
        score = self._scores.get(name, -math.inf)
        return score * _LEVELS >= self._hot_from and self.count(name) >= _LEAST_COUNT

    def _leave(self, name: bytes, score: float) -> None:
        level = math.floor(score * _LEVELS)
        self._levels[level].pop(name)
        if not self._levels[level]:
            del self._levels[level]

    def _forget_coldest(self) -> None:
        while self._coldest not in self._levels:
            self._coldest += 1
        name = next(iter(self._levels[self._coldest]))
        self._leave(name, self._scores.pop(name))

    def _find_hottest(self) -> None:
        least = (self._asked / self._half_life + math.log2(_LEAST_COUNT)) * _LEVELS
        room, self._hot_from = self._capacity, math.inf
        for level in sorted((x for x in self._levels if x + 1 > least), reverse=True):
            room -= len(self._levels[level])
            if room < 0:
                return
            self._hot_from = level
