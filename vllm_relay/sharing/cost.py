"""The cost model: the predicted time of a step's attention, by vLLM's kernel and by ours.

Each kernel takes, per layer,

    call + row * requests + token * query tokens + first * KV tokens read for the first time
         + read * (request, KV token) pairs + far * those that a near cache does not hold
         + pair * (query token, KV token) pairs

The terms are launches, work per request and per query, memory traffic, traffic from caches, more of
that where a request's KV exceeds the nearest (`far_tokens`), and arithmetic. vLLM's own kernel and
context attention read what requests share from memory once and from caches for each. System
attention reads a segment once for all its queries; context attention reads the rest of every
request; fusion, in a step with groups, takes time per query token and partial.

The memory traffic of a prefix in no group is charged to its requests in equal parts. So predicted
time is a sum over groups and requests, and good groups can be found by recursion.
"""

import math
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_relay.sharing.forest import Forest, Int32Array
from vllm_relay.sharing.trie import Trie

# Queries of the group by which `Costs.with_packing` decides; groups worth packing have more.
_QUERIES = 8


@dataclass(frozen=True, kw_only=True)
class KernelCosts:
    """Seconds that one kernel takes, by the terms of the module.

    Units of work: tokens in `Costs`; bytes and floating point operations in a measurement
    (`cost_store.Constants`), which holds for other head shapes, too.

    Attributes:
        call: per call. row: per request. token: per unit of queries.
        first: per unit of KV read for the first time. read: per unit of KV that a request reads.
        far: in addition beyond a core's cache. pair: per unit of arithmetic.
    """

    call: float = 0.0
    row: float = 0.0
    token: float = 0.0
    first: float = 0.0
    read: float = 0.0
    far: float = 0.0
    pair: float = 0.0

    def scaled(self, **factors: float) -> "KernelCosts":
        """Each cost times the factor of its name; 1 where there is none."""
        return KernelCosts(**{k: cost * factors.get(k, 1.0) for k, cost in asdict(self).items()})

    def times(self, factor: float) -> "KernelCosts":
        """A kernel that is slower by this factor."""
        return self.scaled(**dict.fromkeys(asdict(self), factor))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one layer of one head shape on one device, in seconds.

    Attributes:
        stock: vLLM's own attention. context: context attention, which returns the LSE.
        system: system attention; ``call`` is per group, ``token`` per query token and level.
        packed: system attention of packed segments; `system` where None.
        near: KV tokens of a request that a core's own cache holds; on a GPU, L2. evicts: as
            `far_tokens`.
        fusion: per query token and partial.
        step: per step with groups, whatever is in it. level: per level.
        copy: per KV token of a segment that is packed; paid once, predicted by `with_packing` only.
        margin: part of the time by which groups have to be predicted faster than none.
    """

    stock: KernelCosts
    context: KernelCosts
    system: KernelCosts
    packed: KernelCosts | None = None
    near: float = 0.0
    evicts: bool = False
    fusion: float = 0.0
    step: float = 0.0
    level: float = 0.0
    copy: float = 0.0
    margin: float = 0.0

    def reading(
        self, kernel: KernelCosts, tokens: NDArray[np.float64] | NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Seconds that requests take to read so many KV tokens each, beside the first reads."""
        return kernel.read * tokens + kernel.far * far_tokens(tokens, self.near, self.evicts)

    def with_margin(self, margin: float) -> "Costs":
        """These costs with our kernels slower by ``margin`` (0.1: by 10 %)."""
        factor = 1 + margin
        return replace(
            self,
            context=self.context.times(factor),
            system=self.system.times(factor),
            packed=self.packed and self.packed.times(factor),
            fusion=factor * self.fusion,
            step=factor * self.step,
            level=factor * self.level,
        )

    def with_packing(self, steps: int) -> "Costs":
        """These costs with all segments packed, the price of that spread over so many steps.

        In place they stay where that is cheaper for a group of `_QUERIES`.
        """
        if self.packed is None:
            return self
        packed = replace(self.packed, first=self.packed.first + self.copy / steps)
        better = packed.first - self.system.first < _QUERIES * (self.system.pair - packed.pair)
        return replace(self, system=packed) if better else self


def far_tokens(
    tokens: NDArray[np.float64] | NDArray[np.int64], near: float, evicts: bool
) -> NDArray[np.float64]:
    """KV tokens of requests that a cache for ``near`` of them does not hold from read to read.

    Args:
        tokens: of each request.
        evicts: True where one core reads them in order, time after time (CPUs): what exceeds the
            cache pushes out the rest before it is read again. Some of it from 0.7 of ``near`` on,
            all from 1.6: fitted by hand to one Xeon. Else the excess alone is far.
    """
    lens = np.asarray(tokens, dtype=np.float64)
    if not evicts:
        return np.maximum(lens - near, 0.0)
    return lens * np.clip((lens / max(near, 1.0) - 0.7) / 0.9, 0.0, 1.0)


def reads(min_saved_tokens: int = 0) -> Costs:
    """Costs that count KV tokens read instead of seconds.

    Ties: fewer groups, then more members, and our kernels rather than vLLM's.

    Args:
        min_saved_tokens: least reads that a group has to save.
    """
    # Far below one token, for a thousand groups and a million requests.
    tie = 2.0**-11
    return Costs(
        stock=KernelCosts(call=tie**2, read=1.0),
        context=KernelCosts(read=1.0),
        system=KernelCosts(call=max(min_saved_tokens - tie, tie), token=-(tie**2), first=1.0),
    )


@dataclass(frozen=True, eq=False)
class StepShape:
    """The part of a step that its predicted time depends on, beside the groups.

    Attributes:
        trie: of all requests. block_size: tokens per block.
        seq_lens: int32 [R], tokens that each request attends to, this step's included.
        query_lens: int32 [R], query tokens of each request in this step.
    """

    trie: Trie
    block_size: int
    seq_lens: Int32Array
    query_lens: Int32Array

    def tokens_stock(self) -> int:
        """KV tokens read by vLLM's own attention: every request its whole sequence."""
        return int(self.seq_lens.sum())

    def tokens_once(self) -> int:
        """Distinct KV tokens of the step."""
        return self.tokens_stock() - self.trie.blocks_repeated() * self.block_size

    def shares(self) -> NDArray[np.float64]:
        """Per request [R]: tokens read first, those of a prefix in equal parts to its holders."""
        first = self.seq_lens.astype(np.float64)
        for node, rows in enumerate(self.trie.rows):
            depth = self.trie.depth[node]
            first[rows] += (self.trie.share(node, depth) - depth) * self.block_size
        return first


def predict_stock(shape: StepShape, costs: Costs) -> float:
    """Seconds per layer that vLLM's own attention takes for a step."""
    stock, lens, queries = costs.stock, shape.seq_lens.astype(np.int64), shape.query_lens
    return float(
        stock.call
        + stock.row * np.count_nonzero(queries)
        + stock.token * queries.sum()
        + stock.first * shape.tokens_once()
        + costs.reading(stock, lens).sum()
        + stock.pair * (queries @ lens)
    )


def predict(forest: Forest, shape: StepShape, costs: Costs) -> float:
    """Seconds per layer that a step takes on our kernels with these groups, or without any."""
    size, context, system = shape.block_size, costs.context, costs.system
    total = context.call + context.row * np.count_nonzero(shape.query_lens)
    queries = shape.query_lens.astype(np.int64)
    end = np.zeros(len(queries), dtype=np.int64)
    partials = np.zeros(len(queries), dtype=np.int64)
    held = np.zeros(len(queries))
    node_of = np.zeros(len(queries), dtype=np.int64)
    for node, own in enumerate(shape.trie.rows):
        node_of[own] = node
    for level in forest.levels:
        total += costs.level
        for group in level:
            rows, tokens = group.rows, group.segment.blocks * size
            total += system.call + system.first * tokens
            total += (system.token + system.pair * tokens) * queries[rows].sum()
            end[rows] = group.segment.end * size
            partials[rows] += 1
            held[rows] = size * shape.trie.share(int(node_of[rows[0]]), group.segment.end)
    left = shape.seq_lens.astype(np.int64) - end
    total += context.token * queries.sum() + context.first * (shape.shares() - held).sum()
    total += costs.reading(context, left).sum() + context.pair * (queries @ left)
    if forest.levels:
        total += costs.step + costs.fusion * (queries @ (partials + 1))
    return float(total)


def min_saved_tokens(costs: Costs) -> int:
    """Fewest KV token reads that a group has to save per layer, so that it pays its call.

    Raises:
        ValueError: reading costs nothing.
    """
    if costs.stock.read <= 0:
        raise ValueError(f"costs: expected a positive cost per read, got {costs.stock.read!r}")
    return math.ceil(costs.system.call / costs.stock.read)
