"""Costs of attention on a GPU, from its data sheet: estimates, until a GPU was measured.

Decode attention is bound by reading KV. What several requests share is read from memory once and
from the L2 cache by all others: vLLM's own attention pays for it at the rate of L2, and sharing
saves less than the bytes suggest. Requests that read one prefix side by side stay in step, so that
a large L2 serves prefixes beyond its size, too, if more slowly; with a small one they push one
another's KV out.
"""

import re
from dataclasses import dataclass

from vllm_relay.sharing.cost import Costs, KernelCosts

# Per layer and group: calls of FlashAttention and fusion, in a CUDA graph, as measured on an H100
# (docs/cuda.md). Outside of one the host launches them, in Python: an estimate.
GRAPH_CALL, HOST_CALL = 35e-6, 95e-6
# Share of L2 that one layer's keys and values fill before they push one another out; share of the
# rate of products that attention reaches.
L2_SHARE, PRODUCT_SHARE = 0.8, 0.6


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU.

    Attributes:
        memory: bytes per second. l2: bytes of L2 cache. l2_rate: bytes per second from it.
        in_step: bytes per second of a prefix that L2 does not hold, by requests side by side.
        products: dense floating point operations per second in bf16.
    """

    memory: float
    l2: int
    l2_rate: float
    in_step: float
    products: float


_MIB = 1 << 20
# Data sheets of NVIDIA (SXM where there are several). Rates of L2, which they lack: of H100 as
# measured (docs/cuda.md), of H200, which has its chip, the same; the others are estimates from what
# was published of A40 and A100.
GPUS = {
    "A40": Gpu(memory=0.696e12, l2=6 * _MIB, l2_rate=2.5e12, in_step=0.696e12, products=150e12),
    "A100": Gpu(memory=2.04e12, l2=40 * _MIB, l2_rate=4.5e12, in_step=4.5e12, products=312e12),
    "L40S": Gpu(memory=0.864e12, l2=96 * _MIB, l2_rate=4.5e12, in_step=4.5e12, products=362e12),
    "H100": Gpu(memory=3.35e12, l2=50 * _MIB, l2_rate=7.0e12, in_step=5.2e12, products=989e12),
    "H200": Gpu(memory=4.8e12, l2=50 * _MIB, l2_rate=7.0e12, in_step=5.2e12, products=989e12),
    "B200": Gpu(memory=8.0e12, l2=126 * _MIB, l2_rate=12e12, in_step=12e12, products=2250e12),
}


def find_gpu(name: str) -> tuple[str, Gpu] | None:
    """The GPU of a device name such as "NVIDIA H100 80GB HBM3", and what `GPUS` calls it."""
    words = re.findall(r"\w+", name.upper())
    return next(((key, gpu) for key, gpu in GPUS.items() if key in words), None)


def is_gpu(name: str) -> bool:
    """True for the name of a GPU, known or not."""
    return find_gpu(name) is not None or name.startswith("NVIDIA ")


def gpu_costs(gpu: Gpu, heads: int, kv_heads: int, head_size: int, item: int = 2) -> Costs:
    """The costs of one layer on one rank, in full CUDA graphs.

    Args:
        heads, kv_heads, head_size: of the rank. item: bytes of an element.
    """
    kv = 2 * kv_heads * head_size * item
    beyond = kv * max(0.0, 1 / gpu.memory - 1 / gpu.l2_rate)
    far = kv * max(0.0, 1 / gpu.in_step - 1 / gpu.l2_rate)
    read = KernelCosts(first=beyond, read=kv / gpu.l2_rate, far=far)
    # One read from memory for all queries, and products of all of them.
    system = KernelCosts(
        call=GRAPH_CALL,
        first=kv / gpu.memory,
        pair=4 * heads * head_size / (PRODUCT_SHARE * gpu.products),
    )
    return Costs(stock=read, context=read, system=system, near=L2_SHARE * gpu.l2 / kv)
