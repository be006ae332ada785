"""Random calls of the CPU kernels against the float64 oracle.

    python -m tests.unit.ops.fuzz_native --cases 10000 [--library build/sanitized.so] [--isa avx2]

`python -m tests.unit.ops.sanitized OUT.so` builds the library with AddressSanitizer and UBSan and
prints the environment that it needs. Failures are printed with their seeds.
"""

import argparse
import random
import sys
import traceback
from typing import Any

import numpy as np
import torch

from tests.unit.ops import inputs
from vllm_relay.ops import context_attention, providers, reference, system_attention
from vllm_relay.ops.fusion.native import fuse
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.packed import PackedSegment
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.ops.step.native import NativeStep
from vllm_relay.sharing import Forest, Group, Segment, make_plan

LAYOUTS = ("tokens", "heads", "turned", "packed")


def _shape(rng: random.Random) -> tuple[int, int, int, torch.dtype]:
    """Query heads, KV heads, head size, dtype."""
    kv_heads, share = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3, 5])
    size = 16 * rng.choice([1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 10, 12, 14, 16, 32])
    return kv_heads * share, kv_heads, size, rng.choice(inputs.DTYPES)


def _strided(rng: random.Random, tokens: int, heads: int, size: int, dtype: torch.dtype, seed: int):
    """``[tokens, heads, size]`` in some order of memory, with gaps that hold NaN."""
    order = rng.choice([(0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 1, 0)])
    shape = [(tokens, heads, size)[axis] for axis in order]
    whole = torch.full([n + rng.choice([0, 0, 1, 3]) for n in shape], torch.nan).to(dtype)
    view = whole[tuple(slice(0, n) for n in shape)]
    view.copy_(inputs.normal(*shape, dtype=dtype, seed=seed))
    return view.permute([order.index(axis) for axis in range(3)])


def _length(rng: random.Random, most: int) -> int:
    return rng.choice([0, 1, 2, rng.randint(1, 70), rng.randint(1, most)])


def check_system(rng: random.Random, seed: int) -> None:
    heads, kv_heads, size, dtype = _shape(rng)
    tokens, keys = _length(rng, 40), _length(rng, 900)
    q = _strided(rng, tokens, heads, size, dtype, seed)
    k, v = (_strided(rng, keys, kv_heads, size, dtype, seed + i) for i in (1, 2))
    scale = rng.choice([None, 0.1, -0.05])
    out, lse = system_attention(q, k, v, scale=scale)
    exact, exact_lse = reference.attention_lse(q, k, v, scale)
    usual = inputs.stock(q * ((scale or size**-0.5) * size**0.5), k, v) if keys else exact.to(dtype)
    inputs.assert_as_good(out, usual, exact)
    inputs.assert_lse(lse, exact_lse, dtype)


def check_context(rng: random.Random, seed: int) -> None:
    heads, kv_heads, size, dtype = _shape(rng)
    rows = rng.randint(1, 5)
    step = inputs.paged(
        [_length(rng, 500) for _ in range(rows)],
        [rng.choice([0, 1, 1, rng.randint(1, 9)]) for _ in range(rows)],
        heads=(heads, kv_heads),
        head_size=size,
        block_size=rng.choice([1, 7, 16, 32, 32, 64, 100, 128, 144, 200, 400, 512]),
        dtype=dtype,
        layout=rng.choice(LAYOUTS),
        seed=seed,
    )
    from tests.unit.ops.test_context import check

    check(step, context_attention)


def check_fusion(rng: random.Random, seed: int) -> None:
    heads, _, size, dtype = _shape(rng)
    tokens, count = rng.randint(1, 30), rng.randint(1, 6)
    outs, lses = inputs.partials(count, tokens, heads, size, dtype, seed)
    for lse, out in zip(lses, outs, strict=True):
        empty = torch.rand(heads, tokens) < rng.choice([0, 0, 0.3])
        lse[empty] = rng.choice([-torch.inf, torch.inf])
        out[empty.T] = torch.nan
    wide = rng.random() < 0.5
    places = torch.randperm(tokens + 3)[:tokens] if rng.random() < 0.5 else None
    into = torch.full((tokens + 3, heads, size), 7.0).to(dtype)
    fuse([x.float() for x in outs] if wide else outs, lses, into, places)
    got = into[:tokens] if places is None else into[places]
    inputs.assert_fused(got, reference.relay_fusion(outs, lses))
    assert (into == 7).all((1, 2)).sum() >= 3, "written beyond its places"


def _scores(
    rng: random.Random, heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> tuple[dict[str, Any], AttentionShape, dict[str, Any]]:
    """Arguments of the oracle, of a step, and of its run."""
    window = rng.choice([0, 0, 1, rng.randint(1, 40), rng.randint(1, 600)])
    softcap = rng.choice([0.0, 0.0, 2.0, 30.0])
    of_layer: dict[str, Any] = {}
    if rng.random() < 0.3:
        of_layer["slopes"] = torch.rand(heads, dtype=torch.float32) * rng.choice([0.01, 1.0])
    if rng.random() < 0.3:
        of_layer["sinks"] = torch.randn(heads, dtype=torch.float32) * rng.choice([1.0, 20.0])
    exact = {"softcap": softcap, **of_layer} if softcap or of_layer else {}
    if window:
        exact["window"] = window - 1
    shape = AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        dtype=dtype,
        scale=size**-0.5,
        softcap=softcap,
        window=window,
    )
    return exact, shape, of_layer


def check_step(rng: random.Random, seed: int) -> None:
    """Groups, packed or in place, and contexts in one call, against each request's attention.

    With a window, a soft cap, ALiBi's slopes and sinks, or without.
    """
    heads, kv_heads, size, dtype = _shape(rng)
    block = rng.choice([32, 64, 128])
    groups = [(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(rng.randint(0, 3))]
    group_of = [g for g, (rows, _) in enumerate(groups) for _ in range(rows)]
    group_of += [-1] * rng.randint(0, 2)
    if rng.random() < 0.5:  # else the plan's order is that of the batch
        rng.shuffle(group_of)
    shared = [groups[g][1] if g >= 0 else 0 for g in group_of]
    if not shared:
        shared = [0, 0]
    queries = [rng.choice([1, rng.randint(1, 4), rng.randint(1, 200)]) for _ in shared]
    own = [rng.randint(n, max(n, 2 * block)) for n in queries]
    lens = [blocks * block + n for blocks, n in zip(shared, own, strict=True)]
    args = {"heads": (heads, kv_heads), "head_size": size, "block_size": block, "dtype": dtype}
    step = inputs.paged(lens, queries, **args, layout=rng.choice(LAYOUTS), seed=seed)
    layout = native.layout_of(step.k_cache, step.v_cache, paged=True)
    level, packed, segments = [], [], []
    for g, (_, blocks) in enumerate(groups):
        members = np.flatnonzero(np.array(group_of) == g).astype(np.int32)
        step.block_table[members, :blocks] = step.block_table[members[0], :blocks].clone()
        level.append(Group(Segment(0, blocks), members))
        packed.append(rng.random() < 0.5)
        if packed[-1]:
            table = step.block_table[members[0], :blocks].numpy()
            segments.append(PackedSegment(layout, kv_heads, size, dtype, table))
    plan = make_plan(
        Forest((tuple(level),) if level else (), len(lens), block),
        step.block_table.numpy(),
        np.array(lens, dtype=np.int32),
        step.query_start_loc.numpy(),
    )
    scores, shape, of_layer = _scores(rng, heads, kv_heads, size, dtype)
    got = torch.full_like(step.q, torch.nan)
    attention = NativeStep(plan, packed, shape)
    attention.run(step.q, layout, [segment.layout for segment in segments], got, **of_layer)
    exact, usual = [], []
    for row in range(len(lens)):
        q, k, v = step.row(row)
        exact.append(reference.attention_lse(q, k, v, causal=True, **scores)[0])
        usual.append(inputs.stock(q, k, v, causal=True, **scores))
    largest = float(torch.cat(exact).abs().max())
    inputs.assert_as_good(got, torch.cat(usual), torch.cat(exact), partial=largest)


CHECKS = (check_system, check_context, check_fusion, check_step)


def run(cases: int, seed: int) -> list[str]:
    """Failures of `cases` random calls."""
    failures = []
    before = torch.get_num_threads()
    with providers.use("system", "native"), providers.use("context", "native"):
        for case in range(seed, seed + cases):
            rng = random.Random(case)
            torch.manual_seed(case)
            torch.set_num_threads(rng.randint(1, 4))
            check = rng.choice(CHECKS)
            try:
                check(rng, case)
            except Exception:
                failures.append(f"seed {case}, {check.__name__}: {traceback.format_exc()}")
    torch.set_num_threads(before)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", help="path; default: the installed one")
    parser.add_argument("--isa", help="instruction set; default: the best")
    args = parser.parse_args()
    if args.library:
        library = native.Library(args.library)
        native.library = lambda: library
    if args.isa:
        native.loaded().use_isa(args.isa)
    failures = run(args.cases, args.seed)
    for failure in failures[:10]:
        print(failure)
    print(f"{native.loaded().isa}: {args.cases} cases, {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
