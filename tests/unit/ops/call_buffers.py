"""Buffers that a call of the CPU kernels points to; their sizes follow from the call."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.library import KEYS, LAYOUT, PIECE, TABLE, Call, Layout, Operand, Rows

SIZES = (2, 2, 4)  # bytes of an element, by `native.DTYPES`


@dataclass(frozen=True, order=True)
class Buffer:
    """Memory of this process that a call points to."""

    start: int
    stop: int
    written: bool = False


def sequences_of(call: Call) -> np.ndarray:
    """The call's sequences, int64 ``[n, 8]``."""
    count = call.num_sequences * (TABLE + 1)
    values = (ctypes.c_int64 * count).from_address(call.sequences) if count else []
    return np.array(values, dtype=np.int64).reshape(-1, TABLE + 1)


def buffers_of(call: Call, function: str) -> Iterable[Buffer]:
    """Everything that a call points to but its structs."""
    size, partial_size = SIZES[call.dtype], SIZES[call.partial_dtype]
    rows = call.tokens
    if call.places:
        yield Buffer(call.places, call.places + 8 * rows)
        places = (ctypes.c_int64 * rows).from_address(call.places)
        rows = max(places, default=-1) + 1
    for x in (call.scores.slopes, call.scores.sinks):
        if x:
            yield Buffer(x, x + 4 * call.heads)
    if call.positions:
        yield Buffer(call.positions, call.positions + 8 * call.tokens)
    if function == "attend":
        yield _rows(call, call.q, rows, call.head_size, size)
    yield _rows(call, call.fused, rows, call.head_size, size, written=True)
    for x in call.partials[: call.num_partials]:
        yield _rows(call, x.out, call.tokens, call.head_size, partial_size, written=True)
        yield _rows(call, x.lse, call.tokens, 1, 4, written=True)
    sequences = sequences_of(call)
    for index in range(call.num_layouts):
        layout = call.layouts[index]
        keys = sequences[sequences[:, LAYOUT] == index, KEYS]
        yield from operands_of(call, layout, int(max(keys, default=0)))
    for x in sequences:
        tokens = call.layouts[int(x[LAYOUT])].block_tokens
        if tokens:
            yield Buffer(int(x[TABLE]), int(x[TABLE] + 4 * -(-x[KEYS] // tokens)))


def _rows(call: Call, x: Rows, rows: int, width: int, size: int, written: bool = False) -> Buffer:
    """A `Rows` of so many tokens, each of `width` elements of `size` bytes."""
    if not x.base or not rows or not call.heads:
        return Buffer(0, 0)
    elements = (rows - 1) * x.token + (call.heads - 1) * x.head + width
    return Buffer(x.base, x.base + elements * size, written)


def operands_of(call: Call, layout: Layout, tokens: int, written: bool = False) -> list[Buffer]:
    """Keys and values: all blocks, or so many tokens."""
    found = []
    if layout.block_tokens:
        tokens = layout.block_tokens if layout.blocks else 0
    for x, keys in ((layout.k, True), (layout.v, False)):
        elements = _elements(x, keys, tokens, call.head_size) if tokens else 0
        if elements:
            elements += (call.kv_heads - 1) * x.head
            elements += (layout.blocks - 1) * x.block if layout.block_tokens else 0
        found.append(Buffer(x.base or 0, (x.base or 0) + elements * SIZES[call.dtype], written))
    return found


def _elements(x: Operand, keys: bool, tokens: int, head_size: int) -> int:
    """Elements from the first to the last of one KV head (csrc/abi.h, `relay_kind`)."""
    if x.kind == native.PANELS:
        return -(-tokens // PIECE) * PIECE * head_size
    if (x.kind == native.ROWS) == keys:
        return (head_size - 1) * x.stride + tokens
    return (tokens - 1) * x.stride + head_size
