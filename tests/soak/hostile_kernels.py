"""Hostile arguments of the CPU kernels' Python entry points; all tensors end at guard pages."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.soak.hostile_guards import Guards
from tests.soak.hostile_text import Case, accepted
from vllm_relay.ops import context_attention, providers, relay_fusion, system_attention
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.packed import PackedSegment
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.ops.step.native import NativeStep
from vllm_relay.sharing import Forest, Group, Segment, make_plan

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def _serial(function: int, data: int, threads: int, flags: int) -> None:
    """In the place of GOMP_parallel: one thread takes all parts of the work."""
    _RUN(function)(data)


def make_case(folder: Path) -> Case:
    """Calls of attention, fusion, packing and whole steps, half of them with a wrong argument."""
    library, guards = native.loaded(), Guards()
    library.parallel = ctypes.cast(_serial, ctypes.c_void_p).value
    stock = torch.empty

    def empty(*shape: Any, dtype: Any, device: Any = None) -> Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if 0 in sizes:
            return stock(sizes, dtype=dtype)
        return guards.tensor(sizes, dtype, align=64)

    def case(rng: Random) -> bool:
        call = rng.choice((_system, _context, _context, _fusion, _step, _step))(rng, guards)
        try:
            with (
                mock.patch.object(torch, "empty", empty),
                mock.patch.object(torch, "get_num_threads", lambda: 1 + rng.randrange(4)),
                providers.use("system", "native"),
                providers.use("context", "native"),
            ):
                return accepted(call)
        finally:
            guards.free()

    return case


def _shape(rng: Random) -> tuple[int, int, int, torch.dtype]:
    """Query heads, KV heads, head size, dtype."""
    kv_heads, share = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3, 5))
    size = 16 * rng.choice((1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 16, 32))
    if rng.random() < 0.05:
        size = rng.choice((1, 8, 17, 264, 1024))
    return kv_heads * share, kv_heads, size, rng.choice(DTYPES)


def _length(rng: Random, most: int) -> int:
    return rng.choice((0, 1, 2, rng.randint(1, 70), rng.randint(1, most)))


def _dense(rng: Random, guards: Guards, *sizes: int, dtype: torch.dtype) -> Tensor:
    """A tensor in some order of memory, at one end of its pages."""
    order = list(range(len(sizes)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    shape = [sizes[axis] for axis in order]
    whole = guards.tensor(shape, dtype, at_end=rng.random() < 0.8)
    return whole.permute([order.index(axis) for axis in range(len(sizes))])


def _ints(guards: Guards, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    values = torch.tensor(values, dtype=dtype)
    found = guards.tensor(values.shape, dtype)
    return found.copy_(values)


def _spoilt(rng: Random, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, half of the time with one that is cut, bent, of another dtype or no tensor."""
    if rng.random() < 0.5:
        return given
    name = rng.choice(list(given))
    value = given[name]
    if isinstance(value, list):
        if not value:
            return given
        value = list(value)
        at = rng.randrange(len(value))
        value[at] = _bent(rng, value[at])
        return given | {name: rng.choice((value, value[:-1], value * 2))}
    if isinstance(value, Tensor):
        return given | {name: _bent(rng, value)}
    return given | {name: rng.choice((float("nan"), float("inf"), "x", -1.0, 0.0, 1e30))}


def _bent(rng: Random, x: Tensor) -> Any:
    match rng.randrange(6):
        case 0 if x.dim():
            axis = rng.randrange(x.dim())
            return x.narrow(axis, 0, max(0, x.shape[axis] - rng.choice((1, 1, 5))))
        case 1:
            return x.to(rng.choice((*DTYPES, torch.float64, torch.int32, torch.int64)))
        case 2:
            return x[None]
        case 3 if x.dim() > 1:
            return x.transpose(*rng.sample(range(x.dim()), 2))
        case 4:
            return None
        case _ if not x.is_floating_point() and x.numel():
            wrong = x.clone()
            wrong.view(-1)[rng.randrange(x.numel())] += rng.choice((-(2**31), -1, 1, 7, 2**30))
            return wrong
        case _:
            return x.flatten()


def _system(rng: Random, guards: Guards) -> Callable[[], Any]:
    heads, kv_heads, size, dtype = _shape(rng)
    tokens, keys = _length(rng, 40), _length(rng, 300)
    given = {"q": _dense(rng, guards, tokens, heads, size, dtype=dtype)}
    given |= {name: _dense(rng, guards, keys, kv_heads, size, dtype=dtype) for name in "kv"}
    given["scale"] = rng.choice((None, 0.1, -0.05))
    given = _spoilt(rng, given)
    return lambda: system_attention(**given)


def _paged(rng: Random, guards: Guards, lens: list[int], block: int, columns: int) -> Tensor:
    """A block table, its unused columns with bad ids."""
    used = [-(-n // block) for n in lens]
    ids = list(range(sum(used)))
    rng.shuffle(ids)
    rows = []
    for count in used:
        rows.append([ids.pop() for _ in range(count)] + [-7] * (columns - count))
    return _ints(guards, rows or torch.zeros(0, columns))


def _caches(
    rng: Random, guards: Guards, blocks: int, block: int, kv_heads: int, size: int, dtype: Any
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[blocks, block_size, Hkv, D]``, side by side in memory or not."""
    if rng.random() < 0.3:
        both = guards.tensor((blocks, kv_heads, block, 2 * size), dtype).transpose(1, 2)
        k, v = both.split(size, -1)
        return k, v
    k, v = (_dense(rng, guards, blocks, block, kv_heads, size, dtype=dtype) for _ in range(2))
    return k, v


def _context(rng: Random, guards: Guards) -> Callable[[], Any]:
    heads, kv_heads, size, dtype = _shape(rng)
    block = rng.choice((1, 7, 16, 32, 32, 64))
    rows = rng.randint(1, 4)
    lens = [_length(rng, 200) for _ in range(rows)]
    queries = [rng.choice((0, 1, 1, rng.randint(1, 9))) for _ in range(rows)]
    columns = max(-(-n // block) for n in lens) + rng.choice((0, 0, 1))
    blocks = sum(-(-n // block) for n in lens) + rng.choice((0, 0, 1))
    k, v = _caches(rng, guards, blocks, block, kv_heads, size, dtype)
    given = _spoilt(
        rng,
        {
            "q": _dense(rng, guards, sum(queries), heads, size, dtype=dtype),
            "k_cache": k,
            "v_cache": v,
            "block_table": _paged(rng, guards, lens, block, columns),
            "context_lens": _ints(guards, lens),
            "query_start_loc": _ints(guards, np.cumsum([0, *queries])),
            "scale": None,
        },
    )
    return lambda: context_attention(**given)


def _fusion(rng: Random, guards: Guards) -> Callable[[], Any]:
    heads, _, size, dtype = _shape(rng)
    tokens, count = rng.randint(0, 30), rng.randint(0, 6)
    given = _spoilt(
        rng,
        {
            "outs": [_dense(rng, guards, tokens, heads, size, dtype=dtype) for _ in range(count)],
            "lses": [_dense(rng, guards, heads, tokens, dtype=torch.float32) for _ in range(count)],
            "out": _dense(rng, guards, tokens, heads, size, dtype=dtype),
        },
    )
    return lambda: relay_fusion(given["outs"], given["lses"], out=given["out"])


def _step(rng: Random, guards: Guards) -> Callable[[], Any]:
    """A plan with groups, read packed or in place; a block id or a length may be wrong."""
    heads, kv_heads, size, dtype = _shape(rng)
    size = max(16, min(512, size // 16 * 16))  # else the layer is refused at the start
    block = rng.choice((32, 64, 128))
    groups = [(rng.randint(1, 4), rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
    group_of = [g for g, (rows, _) in enumerate(groups) for _ in range(rows)]
    group_of += [-1] * rng.randint(0, 2)
    rng.shuffle(group_of)
    shared = [groups[g][1] if g >= 0 else 0 for g in group_of]
    queries = [rng.randint(1, 4) for _ in shared]
    own = [rng.randint(n, 2 * block) for n in queries]
    lens = np.array([s * block + n for s, n in zip(shared, own, strict=True)], dtype=np.int32)
    columns = int(-(-lens.max() // block))
    blocks = int(sum(-(-lens // block)))
    table = _paged(rng, guards, lens.tolist(), block, columns).numpy()
    k, v = _caches(rng, guards, blocks, block, kv_heads, size, dtype)
    if not (native.readable(k, 1) and native.readable(v, 1)):  # no layout that the engine has
        k, v = (x.contiguous() for x in (k, v))
    level = []
    for g, (_, count) in enumerate(groups):
        members = np.flatnonzero(np.array(group_of) == g).astype(np.int32)
        table[members, :count] = table[members[0], :count]
        level.append(Group(Segment(0, count), members))
    starts = np.cumsum([0, *queries]).astype(np.int32)
    q, out = (guards.tensor((int(starts[-1]), heads, size), dtype) for _ in range(2))
    if rng.random() < 0.5:
        wrong = rng.choice((table, table, lens))
        wrong.reshape(-1)[rng.randrange(wrong.size)] = rng.choice((-1, -(2**31), blocks, 2**31 - 1))
    # Cap and window are the model's; nobody checks the tensors' shapes before.
    scores = {"softcap": rng.choice((0.0, 0.0, 5.0)), "window": rng.choice((0, 0, 1, 40, 500))}
    of_layer = {
        name: guards.tensor((heads,), torch.float32)
        for name in ("slopes", "sinks")
        if rng.random() < 0.3
    }
    if of_layer:
        of_layer = _spoilt(rng, of_layer)

    def call() -> None:
        layout = native.layout_of(k, v, paged=True)
        plan = make_plan(Forest((tuple(level),), len(lens), block), table, lens, starts)
        packed = [rng.random() < 0.5 for _ in level]
        segments = [
            PackedSegment(layout, kv_heads, size, dtype, table[group.rows[0], : group.segment.end])
            for group, is_packed in zip(level, packed, strict=True)
            if is_packed
        ]
        shape = AttentionShape(
            heads=heads, kv_heads=kv_heads, head_size=size, dtype=dtype, scale=size**-0.5, **scores
        )
        step = NativeStep(plan, packed, shape)
        step.run(q, layout, [segment.from_token(0) for segment in segments], out, **of_layer)

    return call
