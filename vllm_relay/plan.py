"""The plan of one step: the flat arrays that the CPU kernels and the CUDA calls read.

The CPU engine's plan is made on the host (`sharing.plan.make_plan`) and holds NumPy arrays; the
GPU's is made by Triton kernels (`ops.planning.DevicePlan`) and holds tensors. Both are made once
per step and read by every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

A = TypeVar("A")
"""np.ndarray on the host, torch.Tensor on a device."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Part(Generic[A]):
    """One variable-length attention over the paged KV cache, as ``flash_attn_varlen_func`` takes
    it.

    Attributes:
        query_start_loc: int32 [B + 1], offsets of each sequence's query tokens; tokens before the
            first offset are in no sequence.
        seq_lens: int32 [B], KV tokens of each sequence; 0 for a sequence that is not there.
        block_table: int32 [B, M], KV blocks of each sequence.
        max_query_len, max_seq_len: upper bounds known on the host.
        causal: aligned to the end of the keys; else every query sees every key.
        key_starts: int32 [B], position of each sequence's first key; None: 0.
        num_splits: parts that FlashAttention divides the keys into; 0: its own choice.
        scheduler_metadata: int32 [N], FlashAttention 3's schedule of this call.
    """

    query_start_loc: A
    seq_lens: A
    block_table: A
    max_query_len: int
    max_seq_len: int
    causal: bool
    key_starts: A | None = None
    num_splits: int = 0
    scheduler_metadata: A | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class DensePart(Generic[A]):
    """One group whose keys follow one another in memory: ``flash_attn_varlen_func`` without blocks.

    Two sequences, the second of which is the group. The first has no query: its keys stand for
    those before the group's, so that the group's keys may begin anywhere in a cache seen as one
    sequence of tokens.

    Attributes:
        query_start_loc, key_start_loc: int32 [3], [0, 0, queries] and [0, begin, end]; all 0 where
            no group has such keys.
        max_query_len, max_seq_len: upper bounds known on the host.
        num_splits: as in `Part`.
    """

    query_start_loc: A
    key_start_loc: A
    max_query_len: int
    max_seq_len: int
    causal: bool = False
    num_splits: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan(Generic[A]):
    """One step: each level's segments, read once per group, then every request's context.

    Attributes:
        levels: system attention of each level, outermost first. The sequences of a level are its
            groups; its query tokens are those of ``index``, in that order. The dense group is an
            empty sequence.
        context: context attention of all requests, in the order of the batch.
        index: int32 [levels (+ 1 with `dense`), T], place of each query token of the batch in the
            order of a level, the last row for the tokens of the dense group, which are not in that
            of its level; -1: in no group.
        dense: the group of level 0 that is attended as dense KV instead.
    """

    levels: Sequence[Part[A]]
    context: Part[A]
    index: A
    dense: DensePart[A] | None = None


@dataclass(frozen=True)
class SharingStats:
    """Numbers of what one step or many steps shared.

    Attributes:
        groups: groups of all levels. requests: requests in groups of the outermost level.
        tokens_shared: KV tokens of segments, once per group. tokens_saved: KV tokens not read
            again.
        tokens_stock: KV tokens that vLLM's own attention reads.
        steps, steps_relayed: steps counted, and those with at least one group.
        steps_ungrouped: those on the CPU kernels without a group.
    """

    groups: int = 0
    requests: int = 0
    tokens_shared: int = 0
    tokens_saved: int = 0
    tokens_stock: int = 0
    steps: int = 0
    steps_relayed: int = 0
    steps_ungrouped: int = 0

    def __add__(self, other: "SharingStats") -> "SharingStats":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return SharingStats(*(mine + theirs for mine, theirs in pairs))
