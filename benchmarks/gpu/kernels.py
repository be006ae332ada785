"""Part ``kernels``: is every kernel that relay uses right on this device, and is the plan fast?"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.batches import BLOCK, Batch, Tables, agrees, errors, forest_tables
from benchmarks.gpu.flash import attend_with, flash_attention, stock_attention
from benchmarks.gpu.flash_check import varlen
from benchmarks.gpu.journal import Case, Row, Wrong
from benchmarks.gpu.systems import relay_step, wait_for
from benchmarks.gpu.timing import REPLAYS, Stopwatch, capture

COLUMNS = (
    "rows",
    "blocks",
    "groups",
    "graph",
    "us",
    "us_warm",
    "host_us",
    "bar",
    "error",
    "error_stock",
    "correct",
    "note",
)
# Limit on the plan's time at 1,024 rows x 2,048 blocks.
PLAN_BOUND_US = 60.0
PLAN_ROWS, PLAN_BLOCKS = 1024, 2048
# Rows, blocks of each and groups of the plans checked with a whole layer's heads.
PLANS = ((64, 128, 1), (256, 544, 16), (256, 544, 0))

# query heads, KV heads, head size, dtype, FlashAttention, other fields of `LayerShape`
SELF_TESTS: tuple[tuple[int, int, int, torch.dtype, int, dict[str, Any]], ...] = (
    (32, 8, 128, torch.bfloat16, 3, {}),
    (64, 8, 64, torch.bfloat16, 3, {"sinks": torch.bfloat16}),
    (32, 8, 128, torch.bfloat16, 3, {"fp8": True}),
    (32, 8, 128, torch.bfloat16, 3, {"softcap": 30.0}),
    (32, 32, 128, torch.bfloat16, 3, {}),
    (8, 2, 128, torch.bfloat16, 3, {}),
    (8, 2, 128, torch.float16, 3, {}),
    (8, 1, 64, torch.float16, 3, {}),
    (16, 2, 256, torch.bfloat16, 3, {}),
    (32, 8, 128, torch.bfloat16, 2, {}),
    (8, 2, 96, torch.bfloat16, 2, {}),
)


def self_test(
    heads: tuple[int, int, int], dtype: torch.dtype, version: int, more: dict[str, Any]
) -> Row:
    """The backend's own start-up test."""
    from vllm_relay.backend import self_test as backend

    layer = backend.LayerShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=heads[2],
        block_size=BLOCK,
        dtype=dtype,
        fa_version=version,
        **more,
    )
    failures = backend.run(layer, torch.device("cuda"))
    if failures:
        raise Wrong("; ".join(failures))
    return {"correct": "yes"}


def fusion(partials: int, tokens: int, watch: Callable[[], Stopwatch]) -> Row:
    """Relay fusion against float64, with dead partials that hold NaN; then its time."""
    from vllm_relay.ops import relay_fusion

    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    outs = [randn(tokens, 32, 128, dtype=torch.bfloat16) for _ in range(partials)]
    lses = [randn(32, tokens) * 2 + i for i in range(partials)]
    dead = outs[0].clone(), lses[0].clone()
    dead[0][::3], dead[1][:, ::3] = float("nan"), float("-inf")
    dead[0][1::3], dead[1][:, 1::3] = float("nan"), float("inf")
    merged = torch.full_like(outs[0], float("nan"))
    with_dead = [dead[0], *outs[1:]], [dead[1], *lses[1:]]
    relay_fusion(*with_dead, out=merged)
    weights = torch.stack([x.masked_fill(torch.isinf(x), -torch.inf) for x in with_dead[1]])
    shares = torch.softmax(weights.double(), 0).transpose(1, 2)[..., None].nan_to_num()
    exact = (shares * torch.stack(with_dead[0]).double().nan_to_num()).sum(0)
    error, error_stock = errors(merged, exact)[0], errors(exact.bfloat16(), exact)[0]
    row = {"rows": tokens, "error": f"{error:.3g}", "error_stock": f"{error_stock:.3g}"}
    if not agrees(merged, exact.bfloat16(), exact):
        raise Wrong("the merge is wrong", row)
    timed = watch()
    replay = capture(lambda: relay_fusion(outs, lses, out=merged))
    times = {
        "us": round(timed.microseconds(replay, flushed=True), 1),
        "us_warm": round(timed.microseconds(replay, flushed=False), 1),
    }
    return {**row, "graph": "yes", **times, "correct": "yes"}


def forest_batch(
    rows: int, blocks: int, groups: int, heads: tuple[int, int, int], device: str = "cuda"
) -> tuple[Batch, Tables]:
    """A decode batch over `forest_tables`, and those tables."""
    tables = forest_tables(rows, blocks, groups, device)
    generator = torch.Generator(device).manual_seed(1)
    shape = (tables.blocks, BLOCK, heads[1], 2 * heads[2])
    cache = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    q = torch.randn((rows, *heads[::2]), generator=generator, device=device, dtype=torch.bfloat16)
    k, v = cache.split(heads[2], -1)
    starts = torch.arange(rows + 1, device=device, dtype=torch.int32)
    return Batch(q, k, v, tables.block_table, tables.seq_lens, starts), tables


def check_plan(made: Any, batch: Batch, tables: Tables, varlen: Callable[..., Any]) -> Row:
    """Is the plan of a batch right? It is if it finds the groups and the savings that the tables
    were made with, and relay attention over it is as close to float64 as one call of `varlen`.

    Raises:
        Wrong: it is not.
    """
    from vllm_relay.ops.step.paged import paged_relay

    rows, blocks = batch.block_table.shape
    row: Row = {"rows": rows, "blocks": blocks, "groups": tables.groups}
    planned = relay_step(made, batch)
    wait_for(batch.q.device)
    found = made.newest()[0]
    if (found.groups, found.tokens_saved) != (tables.groups, tables.saved):
        raise Wrong(f"found {found}, expected {tables.groups} groups, {tables.saved} saved", row)
    stock, out = torch.empty_like(batch.q), torch.full_like(batch.q, float("nan"))
    stock_attention(batch, varlen, stock)
    paged_relay(batch.q, batch.k_cache, batch.v_cache, planned, attend_with(varlen), out=out)
    exact, _ = batch.exact()
    row["error"], row["error_stock"] = (f"{errors(x, exact)[0]:.3g}" for x in (out, stock))
    if not agrees(out, stock, exact):
        raise Wrong("relay attention over the plan is wrong", row)
    return {**row, "correct": "yes"}


def plan(
    rows: int,
    blocks: int,
    groups: int,
    watch: Callable[[], Stopwatch],
    heads: tuple[int, int, int] = (4, 1, 64),
    bound: float | None = None,
) -> Row:
    """Check the plan of a forest, then time it: as a graph and as plain launches."""
    from vllm_relay.ops.planning.device_plan import DevicePlan

    batch, tables = forest_batch(rows, blocks, groups, heads)
    made = DevicePlan(
        max_rows=rows, max_tokens=rows, max_blocks=blocks, block_size=BLOCK, device="cuda"
    )
    row = check_plan(made, batch, tables, flash_attention(3))

    def update() -> None:
        relay_step(made, batch)

    timed = watch()
    replay = capture(update)
    row |= {
        "graph": "yes",
        "us": round(timed.microseconds(replay, flushed=True), 1),
        "us_warm": round(timed.microseconds(replay, flushed=False), 1),
        "host_us": round(timed.host_microseconds(update), 1),
    }
    plain = timed.microseconds(update, flushed=True)
    row["note"] = f"plain launches {plain:.1f} us"
    if bound is not None:
        slowest = max(row["us"], plain)
        row["bar"] = f"{'met' if slowest <= bound else 'MISSED'}: {slowest:.0f} of {bound:.0f} us"
    return row


def cases(quick: bool) -> Iterator[Case]:
    """All cases of the part, the most important first."""
    from vllm_relay.ops.planning.launch import MAX_GROUPS

    replays = 5 if quick else REPLAYS
    made: list[Stopwatch] = []

    def watch() -> Stopwatch:
        if not made:
            made.append(Stopwatch(replays))
        return made[0]

    for version in (3, 2):
        yield Case(f"flash attention {version}", partial(varlen, version))
    yield Case("flash attention 3, fp16", partial(varlen, 3, torch.float16))
    for heads, kv_heads, size, dtype, version, more in SELF_TESTS[: 3 if quick else None]:
        name = " ".join(
            [f"self-test {heads}/{kv_heads}x{size} {str(dtype)[6:]} FA{version}", *more]
        )
        yield Case(name, partial(self_test, (heads, kv_heads, size), dtype, version, more))
    for partials, tokens in ((4, 256), (2, 64), (2, 1024))[: 1 if quick else None]:
        yield Case(
            f"relay fusion n={partials} T={tokens}", partial(fusion, partials, tokens, watch)
        )
    rows, blocks = PLAN_ROWS, PLAN_BLOCKS
    for r, b, groups in PLANS:
        name = f"plan {r} x {b}, {groups} groups"
        yield Case(name, partial(plan, r, b, groups, watch, heads=(32, 8, 128)))
    for groups in () if quick else (16, 0, MAX_GROUPS):
        name = f"plan {rows} x {blocks}, {groups} groups"
        yield Case(name, partial(plan, rows, blocks, groups, watch, bound=PLAN_BOUND_US), 40)
