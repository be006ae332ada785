"""Ceilings: matrix-product rate and memory reads of this machine, and the papers' theory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.environment import multiplies_bf16

_SIDE = 2048
_BYTES = 256 << 20


def median_seconds(call: Callable[[], Any], rounds: int = 9) -> float:
    """Median seconds of a call, after one warm-up."""
    call()
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def gemm_rate() -> float:
    """Operations per second of PyTorch's product of two square matrices.

    They hold bf16, or float32 on a CPU that lacks bf16.
    """
    a, b = torch.randn(2, _SIDE, _SIDE)
    if multiplies_bf16():
        a, b = a.bfloat16(), b.bfloat16()
    return 2 * _SIDE**3 / median_seconds(lambda: a @ b)


def read_rate() -> float:
    """Bytes per second of summing more memory than the caches hold."""
    x = torch.ones(_BYTES // 4)
    return _BYTES / median_seconds(x.sum)


def theoretical_speed_up(requests: int, prefix: int, context: int) -> float:
    """Speed-up of attending to a prefix once for all requests, by RelayAttention's eq. 10.

    Source: arXiv 2402.14808. Tokens read when each request reads its whole sequence, over tokens
    read when the prefix is read once; memory alone takes time. The constants are queries, outputs
    and the operands of the fusion.
    """
    return (prefix + context + 2) / (prefix / requests + context + 7)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Ceilings of a machine, and the heads of one attention layer in bf16 on it.

    Attributes:
        gemm: operations per second of a matrix product. read: bytes per second of memory.
    """

    gemm: float
    read: float
    query_heads: int
    kv_heads: int
    head_size: int

    def most(self, requests: int, prefix: int, context: int) -> float:
        """The most that attending to a prefix once for all requests can speed attention up.

        As `theoretical_speed_up`, but each part of a step takes as long as its reads or its
        arithmetic, whichever is more.
        """
        stock = self._seconds(requests * (prefix + context), requests * (prefix + context))
        prefix_once = self._seconds(prefix, requests * prefix)
        return stock / (prefix_once + self._seconds(requests * context, requests * context))

    def _seconds(self, tokens_read: int, products: int) -> float:
        """Seconds for KV tokens that are read, and products of a request with a KV token."""
        read = 4 * self.kv_heads * self.head_size * tokens_read / self.read
        return max(read, 4 * self.query_heads * self.head_size * products / self.gemm)
