"""What the machine can do at most, measured in the run that it is compared with."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_SIDE = 2048
_BYTES = 256 << 20


def median_seconds(call: Callable[[], Any], rounds: int = 9) -> float:
    """Of a call, after one to warm up."""
    call()
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def gemm_rate() -> float:
    """Operations per second of PyTorch's bf16 product of two square matrices."""
    a, b = torch.randn(2, _SIDE, _SIDE).bfloat16()
    return 2 * _SIDE**3 / median_seconds(lambda: a @ b)


def read_rate() -> float:
    """Bytes per second of summing more memory than the caches hold."""
    x = torch.ones(_BYTES // 4)
    return _BYTES / median_seconds(x.sum)
