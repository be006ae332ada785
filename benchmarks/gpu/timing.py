"""GPU timing by events, and the roofline."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPLAYS = 21
# Several times the L2 of any Hopper GPU (50 to 60 MB).
_FLUSH_BYTES = 256 << 20
# Clock cycles that the device waits before a timed region, so that launching from Python is hidden.
_HEAD_START = 1_000_000

Work = Callable[[], object]


def capture(work: Work) -> Work:
    """`work` as one CUDA graph; returns its replay.

    Warmed up first on a side stream, as torch asks for, so that kernels are compiled.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        graph.replay()

    return replay


class Stopwatch:
    """Median times of repeated work on the current CUDA stream.

    Args:
        replays: repetitions per time.
    """

    def __init__(self, replays: int = REPLAYS) -> None:
        self._replays = replays
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def microseconds(self, work: Work, *, flushed: bool) -> float:
        """Median over the replays, after one that does not count.

        Args:
            flushed: write over the L2 cache before each; otherwise each finds what the one before
                left there.
        """
        times = []
        for _ in range(self._replays + 1):
            if flushed:
                self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_START)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times[1:])

    def host_microseconds(self, work: Work) -> float:
        """Median time that the host spends in `work`, the device having nothing else to do."""
        times = []
        for _ in range(self._replays + 1):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            work()
            times.append((time.perf_counter() - begun) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(times[1:])


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of this device, measured in this run.

    Attributes:
        copy, read: bytes per second of device memory; a copy counts what it reads and writes.
        matmul: floating-point operations per second of a large bf16 matrix product.
    """

    copy: float
    read: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        """The larger of the two: the stricter roofline."""
        return max(self.copy, self.read)

    def row(self) -> dict[str, float]:
        return {
            "copy_tb_s": round(self.copy * 1e-12, 3),
            "read_tb_s": round(self.read * 1e-12, 3),
            "matmul_tflop_s": round(self.matmul * 1e-12, 1),
        }


CEILING_COLUMNS = ("copy_tb_s", "read_tb_s", "matmul_tflop_s")


def measure_ceilings(watch: Stopwatch) -> Ceilings:
    """Measure them, on random data: zeros let the clock rise. Takes about 6 GB."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    total = torch.empty((), device="cuda")
    size = source.numel() * source.element_size()
    copy = watch.microseconds(lambda: target.copy_(source), flushed=True)
    read = watch.microseconds(lambda: torch.sum(source, 0, out=total), flushed=True)
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    matmul = watch.microseconds(lambda: torch.matmul(a, b, out=product), flushed=True)
    return Ceilings(2 * size / copy * 1e6, size / read * 1e6, 2 * n**3 / matmul * 1e6)


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of one layer: each of `batch` requests brings one token.

    Attributes:
        shared: tokens of the one prefix that all requests share. own: tokens of each request behind
            it, the newest included. itemsize: bytes of an element of queries and KV.
    """

    batch: int
    shared: int
    own: int
    query_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    itemsize: int = 2

    @property
    def name(self) -> str:
        heads = f"{self.query_heads}/{self.kv_heads}x{self.head_size}"
        return f"B={self.batch} P={self.shared} S={self.own} {heads}"

    @property
    def bytes(self) -> int:
        """The least that can be moved: all KV once, queries in, results out."""
        kv = 2 * self.kv_heads * (self.shared + self.batch * self.own)
        return (kv + 2 * self.batch * self.query_heads) * self.head_size * self.itemsize

    @property
    def flops(self) -> int:
        """Multiply-adds counted twice, of the two products of attention."""
        keys = self.shared + self.own
        return 4 * self.batch * self.query_heads * self.head_size * keys

    def roofline_us(self, ceilings: Ceilings) -> float:
        """max(bytes / bandwidth, FLOPs / rate) in microseconds: no exact method is faster, unless
        KV is found in the L2 cache."""
        return max(self.bytes / ceilings.bandwidth, self.flops / ceilings.matmul) * 1e6
