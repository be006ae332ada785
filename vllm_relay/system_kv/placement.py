"""The KV blocks of system KVs: the same answer in every process, from token ids alone."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# Tokens of the largest KV block that a file is kept for, unless its builder has larger ones.
_BLOCK_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers of an engine that have one block table in common: vLLM's KV cache group.

    Attributes:
        block_size: of its KV blocks, in tokens.
        window: tokens that a query sees, itself included; None: all.
        layers: their names.
    """

    block_size: int
    window: int | None
    layers: tuple[str, ...]

    def blocks_for_hit(self) -> int:
        """Blocks that vLLM looks for before the end of a hit (``SlidingWindowManager``)."""
        assert self.window is not None
        return max(1, math.ceil((self.window - 1) / self.block_size))


@dataclass(frozen=True)
class Placement:
    """The KV blocks of one prompt in one KV cache group.

    Attributes:
        block_ids: by column of a block table; the null block 0 before a window.
        shared: how many leading ones are null, or of an earlier prompt with the same tokens.
    """

    block_ids: tuple[int, ...]
    shared: int


def alignment(groups: Sequence[CacheGroup]) -> int:
    """The tokens whose multiples are the lengths of hits: vLLM's ``scheduler_block_size``."""
    return math.lcm(*(group.block_size for group in groups))


def kept_tokens(group: CacheGroup, groups: Sequence[CacheGroup]) -> int | None:
    """Tokens at a prompt's end that its file keeps in a group's layers; None: all.

    Enough for `place` on an engine whose hits are at multiples of up to 256 tokens, or of the
    builder's own alignment.
    """
    if group.window is None:
        return None
    return group.window - 1 + 2 * max(_BLOCK_TOKENS, alignment(groups))


class Placer:
    """Blocks of one prompt after another; those of a common salt and prefix share them.

    Ids begin at 1: block 0 is vLLM's null block. Tokens past the last multiple of `alignment` get
    no block: requests prefill them. Under a window only the blocks have one that vLLM looks for
    behind the whole prompt, and behind all but its last token, which a request always prefills.
    """

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups, self._step = groups, alignment(groups)
        # (chain before, or salt and block size; tokens) -> chain
        self._chains: dict[tuple[Hashable, tuple[int, ...]], int] = {}
        self._known: dict[tuple[int, int], int] = {}  # (group, chain) -> block

    def add(
        self, tokens: Sequence[int], salt: str | None, room: int | None = None
    ) -> tuple[Placement, ...] | None:
        """The blocks of the next prompt, by group.

        None, and it gets none, if all prompts would then have more than ``room`` blocks.
        """
        placed, new = [], dict[tuple[int, int], int]()
        for number, group in enumerate(self._groups):
            size, first = group.block_size, 0
            if group.window is not None:
                end = (len(tokens) - 1) // self._step * self._step
                first = end // size - group.blocks_for_hit()
            ids: list[int] = []
            shared = 0
            chain: Hashable = salt, size
            for column in range(len(tokens) // self._step * self._step // size):
                key = chain, tuple(tokens[column * size : (column + 1) * size])
                chain = self._chains.setdefault(key, len(self._chains))
                block = number, chain
                if shared == column and (column < first or block in self._known):
                    shared += 1
                known = self._known if block in self._known else new
                next_id = 1 + len(self._known) + len(new)
                ids.append(0 if column < first else known.setdefault(block, next_id))
            placed.append(Placement(tuple(ids), shared))
        if room is not None and len(self._known) + len(new) > room:
            return None
        self._known |= new
        return tuple(placed)


def place(
    prompts: Sequence[Sequence[int]], groups: Sequence[CacheGroup], salts: Sequence[str | None]
) -> list[tuple[Placement, ...]]:
    """Blocks of each prompt, by group, see `Placer`."""
    placer, placements = Placer(groups), []
    for tokens, salt in zip(prompts, salts, strict=True):
        placed = placer.add(tokens, salt)
        assert placed is not None  # without a bound
        placements.append(placed)
    return placements


def pinned_ids(placements: Sequence[tuple[Placement, ...]]) -> set[int]:
    """All blocks of some prompts."""
    return {id for placed in placements for group in placed for id in group.block_ids} - {0}


def budget_error(
    pinned: int, usable: int, share: float, max_model_len: int, longest: int
) -> str | None:
    """Why ``pinned`` of ``usable`` blocks cannot be pinned, with the numbers; None when they can.

    ``share`` is the part that may be; a request of ``max_model_len`` tokens, which takes
    ``longest`` blocks, must still fit.
    """
    allowed = math.floor(share * usable + 1e-6)  # 0.29 * 100 is 28.999…
    need = f"system KVs need {pinned:,} of {usable:,} KV cache blocks"
    if pinned > allowed:
        return (
            f"{need} ({pinned / usable:.0%}); system_kv.budget allows {share:.0%}, {allowed:,} "
            "blocks: enlarge the KV cache or the budget, or load fewer"
        )
    if usable - pinned < longest:
        return (
            f"{need}; the other {usable - pinned:,} cannot hold one request of max_model_len "
            f"{max_model_len:,} ({longest:,} blocks), which would wait for ever: enlarge the KV "
            "cache, lower --max-model-len, or load fewer"
        )
    return None
