"""Whether sharing pays: one threshold for now. A fitted cost model replaces it behind `select`."""

from vllm_relay.sharing.forest import Forest, Group, Level


def tokens_saved(group: Group, block_size: int) -> int:
    """KV token reads saved per layer and step: one member reads the segment instead of each."""
    return (len(group.rows) - 1) * group.segment.blocks * block_size


def select(forest: Forest, *, min_saved_tokens: int) -> Forest:
    """Keep the groups that save at least ``min_saved_tokens``.

    A group that saves less stays where a kept one is nested in it: that one starts where it ends.

    Raises:
        ValueError: min_saved_tokens is negative.
    """
    if min_saved_tokens < 0:
        raise ValueError(f"min_saved_tokens must be >= 0, got {min_saved_tokens}")
    kept: list[Level] = []
    nested: set[int] = set()  # one row of each kept group of the level below names it
    for level in reversed(forest.levels):
        groups = tuple(
            group
            for group in level
            if tokens_saved(group, forest.block_size) >= min_saved_tokens
            or (nested and not nested.isdisjoint(group.rows.tolist()))
        )
        nested = {int(group.rows[0]) for group in groups}
        if groups:
            kept.append(groups)
    return Forest(tuple(reversed(kept)), forest.num_rows, forest.block_size)
