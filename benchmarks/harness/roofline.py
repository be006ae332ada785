"""Ceilings: matrix-product rate and memory reads of this machine, and the papers' theory."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

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

    Of bf16; of float32 where oneDNN has no bf16 product, and PyTorch's own is far slower.
    """
    a, b = torch.randn(2, _SIDE, _SIDE)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
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
