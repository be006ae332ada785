"""Token ids of the prefixes that requests came under, and which of them deserve a file."""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

# Prefixes that are compared at a time, the hottest: it is done between two engine steps.
_MOST_PREFIXES = 64
# Behind a prefix whose next block has this share of its count, requests do not part.
_SAME = 0.9


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prefix of whole KV blocks: the hash of each block, and the token ids."""

    hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]


class KnownPrefixes:
    """A trie of KV blocks with their token ids, in bounded memory: the least recent go first.

    Args:
        block_size: tokens of a block. most: blocks that are kept, at least 1.
    """

    def __init__(self, *, block_size: int, most: int) -> None:
        self._block_size, self._most = block_size, most
        # Hash of a block -> hash of the block before it, or b""; its token ids.
        self._blocks: OrderedDict[bytes, tuple[bytes, array[int]]] = OrderedDict()

    def __len__(self) -> int:
        """The number of blocks kept."""
        return len(self._blocks)

    def add(self, hashes: Sequence[bytes], token_ids: Sequence[int]) -> None:
        """Keep a prompt's full blocks; ``hashes``: chained, from the first block on."""
        size = self._block_size
        # The first block last: of one prompt, the end is forgotten before the beginning.
        for column in reversed(range(min(len(hashes), len(token_ids) // size))):
            name = hashes[column]
            if name in self._blocks:
                self._blocks.move_to_end(name)
            else:
                before = hashes[column - 1] if column else b""
                tokens = array("i", token_ids[column * size : (column + 1) * size])
                self._blocks[name] = before, tokens
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def choose(self, counts: Mapping[bytes, float], most: int) -> list[Prefix]:
        """Prefixes that deserve a file, of together ``most`` blocks at most, the hottest first.

        A prefix ends where the count drops: what differs behind it is not in the file. A file holds
        its prefix from the first block on, so a prefix gets one if its blocks that no hotter file
        holds were asked for as often as it has blocks, or more. It then stands for the hotter
        files that it begins with.

        Args:
            counts: requests by block, for the blocks that are hot.
        """
        inner = {
            before
            for name, count in counts.items()
            if (before := self._blocks.get(name, (b"",))[0])
            and count >= _SAME * counts.get(before, 0)
        }
        ends = islice((name for name in counts if name not in inner), _MOST_PREFIXES)
        chains = [self._chain(name) for name in ends]
        found = [
            (sum(counts[name] for name in names) / len(names), names)
            for names in chains
            if names and all(name in counts for name in names)
        ]
        chosen: list[list[bytes]] = []
        held: set[bytes] = set()
        for _, names in sorted(found, key=lambda entry: entry[0], reverse=True):
            gain = sum(counts[name] for name in names if name not in held)
            begun = [i for i, other in enumerate(chosen) if other[-1] in set(names)]
            rest = [other for i, other in enumerate(chosen) if i not in begun]
            if gain < len(names) or sum(map(len, rest)) + len(names) > most:
                continue
            chosen = rest
            chosen.insert(begun[0] if begun else len(chosen), names)
            held.update(names)
        return [
            Prefix(
                hashes=tuple(names),
                token_ids=tuple(chain.from_iterable(self._blocks[name][1] for name in names)),
            )
            for names in chosen
        ]

    def _chain(self, name: bytes) -> list[bytes]:
        """Hashes from a prefix's first block to its last; empty if one of them is forgotten."""
        names = []
        while name:
            if name not in self._blocks:
                return []
            names.append(name)
            name = self._blocks[name][0]
        return names[::-1]


def is_plain(request: Any) -> bool:
    """True for a request of text without a salt or an adapter."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.cache_salt is None
        and request.lora_request is None
        and not request.mm_features
    )
