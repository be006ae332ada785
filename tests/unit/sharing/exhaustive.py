"""The best forest by trying all of them, for a few rows: shares nothing with the policy."""

from functools import cache

from vllm_relay.sharing import Costs, KernelCosts

# Per row: its computed blocks; length and query tokens.
Row = tuple[list[int], int, int]


def common(a: list[int], b: list[int]) -> int:
    """How many leading blocks are equal."""
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def kernel(costs: KernelCosts, near: float, queries: int, tokens: int, first: float) -> float:
    """Time of one row in a kernel, its call left out."""
    per_token = costs.read + costs.pair * queries
    far = costs.far * max(tokens - near, 0)
    return costs.token * queries + costs.first * first + per_token * tokens + far


def best_time(rows: list[Row], block_size: int, costs: Costs, max_levels: int) -> float:
    """The least predicted time of our kernels with any forest of at most so many levels."""
    count = len(rows)
    holders = [
        [sum(common(other[0], mine[0]) > depth for other in rows) for depth in range(len(mine[0]))]
        for mine in rows
    ]

    def first_read(row: int, start: int) -> float:
        """KV tokens after ``start`` blocks, those that others hold too in equal parts."""
        blocks, tokens, _ = rows[row]
        shared = sum(block_size / holders[row][depth] for depth in range(start, len(blocks)))
        return shared + tokens - len(blocks) * block_size

    def context(row: int, end: int, partials: int) -> float:
        _, tokens, queries = rows[row]
        seen = tokens - end * block_size
        time = kernel(costs.context, costs.near, queries, seen, first_read(row, end))
        return time + queries * costs.fusion * (partials + 1)

    @cache
    def inside(members: frozenset[int], end: int, level: int) -> float:
        """Best time of rows whose segments end at ``end``, with groups from this level on."""
        if not members:
            return 0.0
        row = min(members)
        best = context(row, end, level) + inside(members - {row}, end, level)
        if level == most:
            return best
        others = [x for x in members - {row} if common(rows[x][0], rows[row][0]) > end]
        for bits in range(1, 2 ** len(others)):
            group = frozenset([row, *(x for i, x in enumerate(others) if bits >> i & 1)])
            depth = min(common(rows[x][0], rows[row][0]) for x in group)
            rest = inside(members - group, end, level)
            for until in range(end + 1, depth + 1):
                best = min(best, group_time(group, end, until, level) + rest)
        return best

    @cache
    def group_time(group: frozenset[int], start: int, end: int, level: int) -> float:
        tokens = (end - start) * block_size
        queries = sum(rows[x][2] for x in group)
        system = costs.system
        time = system.call + system.first * tokens + (system.token + system.pair * tokens) * queries
        return time + inside(group, end, level + 1)

    everyone = frozenset(range(count))
    fusion = costs.fusion * sum(queries for _, _, queries in rows)
    times = [costs.context.call + sum(context(x, 0, 0) for x in everyone) - fusion]
    for most in range(1, max_levels + 1):
        inside.cache_clear()
        group_time.cache_clear()
        fixed = costs.context.call + costs.step + most * costs.level
        # Even where fewer levels are used: then this time was found with a smaller `most`.
        times.append(fixed + inside(everyone, 0, 0))
    return min(times)
