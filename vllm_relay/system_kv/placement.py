"""The KV blocks of system KVs: the same answer in every process, from token ids alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The KV blocks of one prompt.

    Attributes:
        block_ids: of its full blocks, in order.
        shared: how many leading ones belong to an earlier prompt that begins with the same tokens.
    """

    block_ids: tuple[int, ...]
    shared: int


def place(
    prompts: Sequence[Sequence[int]], block_size: int, salts: Sequence[str | None]
) -> list[Placement]:
    """Block ids from 1 on for each prompt; those of a common salt and prefix share its blocks.

    Block 0 is vLLM's null block. Tokens past the last full block get none: requests prefill them.
    """
    placements: list[Placement] = []
    # (block before, or the salt; tokens) -> block
    known: dict[tuple[int | str | None, tuple[int, ...]], int] = {}
    for tokens, salt in zip(prompts, salts, strict=True):
        ids: list[int] = []
        shared = 0
        for end in range(block_size, len(tokens) + 1, block_size):
            key = (ids[-1] if ids else salt, tuple(tokens[end - block_size : end]))
            if key in known:
                shared += 1
            else:
                known[key] = 1 + len(known)
            ids.append(known[key])
        placements.append(Placement(tuple(ids), shared))
    return placements


def budget_error(
    pinned: int, usable: int, share: float, max_model_len: int, block_size: int
) -> str | None:
    """Why ``pinned`` of ``usable`` blocks cannot be pinned, with the numbers; None when they can.

    ``share`` is the part that may be; a request of ``max_model_len`` tokens must still fit.
    """
    allowed = math.floor(share * usable + 1e-6)  # 0.29 * 100 is 28.999…
    need = f"system KVs need {pinned:,} of {usable:,} KV cache blocks"
    if pinned > allowed:
        return (
            f"{need} ({pinned / usable:.0%}); system_kv.budget allows {share:.0%}, {allowed:,} "
            "blocks: enlarge the KV cache or the budget, or load fewer"
        )
    longest = math.ceil(max_model_len / block_size)
    if usable - pinned < longest:
        return (
            f"{need}; the other {usable - pinned:,} cannot hold one request of max_model_len "
            f"{max_model_len:,} ({longest:,} blocks), which would wait for ever: enlarge the KV "
            "cache, lower --max-model-len, or load fewer"
        )
    return None
