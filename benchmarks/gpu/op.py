"""Part ``op``: one layer's decode attention, relay against stock FlashAttention 3 and FlashInfer.

The bars are judged on "relay" (plan, schedules and attention) and on "relay-layer" (attention
alone), against the faster of "stock" (FlashAttention 3 chooses its splits) and "stock-graphs" (32
splits and a schedule made before, as in vLLM's graphs).

Each system runs as one CUDA graph, with the L2 cache flushed and not; its answer is checked against
float64 in the same run, and a wrong one has no time.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor

from benchmarks.gpu.batches import BLOCK, Batch, agrees, errors, shared_batch
from benchmarks.gpu.flash import flash_attention, stock_attention
from benchmarks.gpu.journal import Case, Row, Wrong
from benchmarks.gpu.systems import SYSTEMS
from benchmarks.gpu.timing import (
    CEILING_COLUMNS,
    REPLAYS,
    Ceilings,
    DecodeStep,
    Stopwatch,
    capture,
    measure_ceilings,
)
from vllm_relay.ops.reference import attention_lse

COLUMNS = (
    "system",
    "batch",
    "shared",
    "own",
    "query_heads",
    "kv_heads",
    "head_size",
    "dtype",
    "graph",
    "replays",
    "us",
    "us_warm",
    "roofline_us",
    "times_roofline",
    "times_stock",
    "stock",
    "bar",
    *CEILING_COLUMNS,
    "groups",
    "error",
    "rms_error",
    "rms_error_stock",
    "correct",
)
SHARED = (
    (64, 8192, 512),
    (256, 8192, 512),
    (16, 8192, 512),
    (64, 2048, 256),
    (64, 512, 512),
    (8, 1024, 512),
)
# Bars at the first of them with 32/8 heads x 128, L2 flushed.
BAR = DecodeStep(*SHARED[0])
BAR_ROOFLINE, BAR_STOCK = 1.25, 8.0
STOCKS = ("stock", "stock-graphs")
# Systems that the bars are judged on.
JUDGED = {"relay": "plan and attention", "relay-layer": "attention"}
# Systems that compile for minutes in their first case.
COMPILED = ("flashinfer",)
CASE_SECONDS, COMPILE_SECONDS = 15.0, 180.0


def shapes(kv_heads: int) -> list[DecodeStep]:
    """Shapes with 32 query heads, with and without sharing."""
    alone = [(64, 0, 2048), (256, 0, 2048), (8, 0, 2048), (1, 0, 2048)]
    return [DecodeStep(*sizes, kv_heads=kv_heads) for sizes in (*SHARED, *alone)]


def exact_shared(batch: Batch, shape: DecodeStep) -> Tensor:
    """Float64 attention of a `shared_batch`, the shared part for all requests in one product."""
    prefix = shape.shared // BLOCK
    outs, lses = [], []
    if prefix:
        ids = batch.block_table[0, :prefix].long()
        k, v = (c[ids].flatten(0, 1) for c in (batch.k_cache, batch.v_cache))
        out, lse = attention_lse(batch.q, k, v)
        outs, lses = [out], [lse]
    own = Batch(
        q=batch.q,
        k_cache=batch.k_cache,
        v_cache=batch.v_cache,
        block_table=batch.block_table[:, prefix:],
        seq_lens=batch.seq_lens - shape.shared,
        query_start_loc=batch.query_start_loc,
    )
    out, lse = own.exact()
    weights = torch.softmax(torch.stack([*lses, lse]), 0).transpose(1, 2)[..., None]
    return (weights * torch.stack([*outs, out])).sum(0)


class Bench:
    """State shared by the cases of one run: watch, ceilings, newest batch, stock's times."""

    def __init__(self, replays: int) -> None:
        self.replays = replays
        self.stock_us: dict[DecodeStep, dict[str, float]] = {}
        # Systems that have run: what they compile is there.
        self.compiled: set[str] = set()
        self.watch = lru_cache(lambda: Stopwatch(replays))
        self.ceilings: Callable[[], Ceilings] = lru_cache(lambda: measure_ceilings(self.watch()))
        self.batch = lru_cache(maxsize=1)(self._batch)

    def _batch(self, shape: DecodeStep) -> tuple[Batch, Tensor, Tensor]:
        """The inputs, stock's answer and the exact one."""
        batch = shared_batch(shape)
        out = torch.empty_like(batch.q)
        stock_attention(batch, flash_attention(3), out)
        return batch, out, exact_shared(batch, shape)

    def run(self, shape: DecodeStep, system: str) -> Row:
        """One row: check the answer of the very graph that is timed, then time it."""
        ceilings = self.ceilings()
        batch, stock_out, exact = self.batch(shape)
        row: Row = {
            "system": system,
            "batch": shape.batch,
            "shared": shape.shared,
            "own": shape.own,
            "query_heads": shape.query_heads,
            "kv_heads": shape.kv_heads,
            "head_size": shape.head_size,
            "dtype": "bfloat16",
            "graph": "yes",
            "replays": self.replays,
            "roofline_us": round(shape.roofline_us(ceilings), 1),
            **ceilings.row(),
        }
        ready, groups = SYSTEMS[system][0](batch, shape)
        if groups is not None:
            row["groups"] = groups
        given = torch.empty_like(batch.q)
        answers: list[Tensor | None] = []
        replay = capture(lambda: answers.append(ready(given)))
        self.compiled.add(system)
        out = given if answers[-1] is None else answers[-1]  # the captured one
        out.fill_(float("nan"))
        replay()
        worst, rms = errors(out, exact)
        row |= {"error": f"{worst:.3g}", "rms_error": f"{rms:.3g}"}
        row["rms_error_stock"] = f"{errors(stock_out, exact)[1]:.3g}"
        if not agrees(out, stock_out, exact):
            raise Wrong("further from float64 than twice the stock kernel", row)
        flushed = self.watch().microseconds(replay, flushed=True)
        warm = self.watch().microseconds(replay, flushed=False)
        stock_us = self.stock_us.setdefault(shape, {})
        if system in STOCKS:
            stock_us[system] = flushed
        return {
            **row,
            "correct": "yes",
            "us": round(flushed, 1),
            "us_warm": round(warm, 1),
            **judged(shape, system, flushed, row["roofline_us"], stock_us),
        }


def judged(
    shape: DecodeStep, system: str, us: float, roofline: float, stock_us: dict[str, float]
) -> Row:
    """Ratios of a time, and whether it passes what the issue asks of this shape.

    times_roofline: time over the roofline's. times_stock: the time of the faster stock over this
    one. stock: which that is.

    Args:
        stock_us: by name of `STOCKS`, those measured so far.
    """
    row: Row = {"times_roofline": round(us / roofline, 3)}
    if stock_us:
        row["stock"] = fastest = min(stock_us, key=lambda name: stock_us[name])
        row["times_stock"] = round(stock_us[fastest] / us, 3)
    if system not in JUDGED or shape != BAR:
        return row
    verdicts = [f"{verdict(us / roofline <= BAR_ROOFLINE)}: <= {BAR_ROOFLINE} x roofline"]
    if stock_us:
        met = stock_us[fastest] / us >= BAR_STOCK
        verdicts.append(f"{verdict(met)}: >= {BAR_STOCK:g} x {fastest}")
    else:
        verdicts.append(f"not judged, stock has no time: >= {BAR_STOCK:g} x stock")
    row["bar"] = "; ".join(f"{text} ({JUDGED[system]})" for text in verdicts)
    return row


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def cases(quick: bool) -> Iterator[Case]:
    """All cases of the part, the most important first; FlashInfer, which compiles, last."""
    bench = Bench(5 if quick else REPLAYS)
    compared = shapes(8)[:1] if quick else [*shapes(8), *shapes(32)]
    own = tuple(name for name in SYSTEMS if name not in COMPILED)
    for names in (own, COMPILED):
        for shape in compared:
            for name in names:
                # One request shares nothing: the backend runs vLLM's own call.
                alone = name not in STOCKS and shape.batch == 1
                if not alone and (shape.shared or not SYSTEMS[name][1]):
                    waits = name in COMPILED and name not in bench.compiled
                    seconds = COMPILE_SECONDS if waits else CASE_SECONDS
                    yield Case(f"{shape.name} {name}", partial(bench.run, shape, name), seconds)
