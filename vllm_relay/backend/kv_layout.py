"""The layout of the CPU engine's KV blocks, learnt by writing numbered tokens.

A block of one KV head is ``2 * block_size * head_size`` elements. Their order depends on the
instruction set that the engine chose (row by row, transposed, in AMX tiles) and on its version.
Instead of knowing every layout, `find_layout` writes numbered tokens through the backend's own
cache update and reads back where each element went.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.library import Layout, Operand

# Integers up to 2 ** 7 are exact in every dtype: positions are written as digits of this base.
_BASE = 128


@dataclass(frozen=True)
class _Axis:
    """Index i lies at ``(i // inner) * outer_stride + (i % inner) * inner_stride``."""

    size: int
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def stride(self) -> int | None:
        """The one stride between neighbours; None where there are two."""
        return self.outer_stride if self.inner == 1 else None


@dataclass(frozen=True)
class _Operand:
    """Keys or values of one (block, head): ``element(t, d) = offset + token(t) + channel(d)``."""

    offset: int
    token: _Axis
    channel: _Axis

    def rows(self, block: torch.Tensor) -> torch.Tensor:
        """``[block_size, H, D]`` of one block ``[H, block_size, 2 * D]``, if possible a view."""
        token, channel = self.token, self.channel
        elements = block.as_strided(
            (
                *(token.size // token.inner, token.inner, block.shape[0]),
                *(channel.size // channel.inner, channel.inner),
            ),
            (
                *(token.outer_stride, token.inner_stride, block.stride(0)),
                *(channel.outer_stride, channel.inner_stride),
            ),
            block.storage_offset() + self.offset,
        )
        return elements.reshape(token.size, block.shape[0], channel.size)

    def for_kernels(self, kv_cache: torch.Tensor, columns: _Axis, steps: _Axis) -> Operand | None:
        """The operand as the CPU kernels read it; None where they cannot.

        ``columns`` and ``steps``: the axes of the product that reads it.
        """
        if columns.stride == 1 and steps.stride is not None:
            kind, stride, panel = native.ROWS, steps.stride, 0
        elif steps.stride == 1 and columns.stride is not None:
            kind, stride, panel = native.ACROSS, columns.stride, 0
        elif (
            # The engine's AMX tiles are the panels of our kernels.
            (steps.inner, steps.inner_stride) == (2, 1)
            and (columns.inner, columns.inner_stride) == (16, 2)
            and native.packs_pairs_of_16(kv_cache.dtype)
        ):
            kind, stride, panel = native.PANELS, steps.outer_stride, columns.outer_stride
        else:
            return None
        return Operand(
            base=kv_cache.data_ptr() + self.offset * kv_cache.itemsize,
            stride=stride,
            panel=panel,
            head=kv_cache.stride(1),
            block=kv_cache.stride(0),
            kind=kind,
        )


@dataclass(frozen=True)
class BlockLayout:
    """Layout of one KV block of the CPU engine."""

    key: _Operand
    value: _Operand

    def rows(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[block_size, H, D]`` of one block ``[H, block_size, 2 * D]``.

        The block's last two dimensions are contiguous.
        """
        return self.key.rows(block), self.value.rows(block)

    def for_kernels(self, kv_cache: torch.Tensor) -> Layout | None:
        """The cache ``[num_blocks, H, block_size, 2 * D]`` as the CPU kernels read it in place.

        None where they cannot read this layout, or blocks of this size.
        """
        blocks, _, block_size, _ = kv_cache.shape
        key = self.key.for_kernels(kv_cache, self.key.token, self.key.channel)
        value = self.value.for_kernels(kv_cache, self.value.channel, self.value.token)
        if key is None or value is None or block_size % native.PIECE:
            return None
        return Layout(key, value, block_size, blocks)


def find_layout(
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
) -> BlockLayout | None:
    """The layout, found by writing one block; None for anything but a rearrangement of elements.

    Args:
        write: ``write(key, value, kv_cache, slot_mapping)``, the backend's ``do_kv_cache_update``;
            key and value ``[T, H, D]``, kv_cache ``[1, H, block_size, 2 * D]``, slot_mapping
            ``[T]`` int64.
        num_kv_heads, block_size, head_size, dtype: of the cache.
    """
    count = block_size * head_size
    number = torch.arange(count).view(block_size, 1, head_size)
    slots = torch.arange(block_size)
    # where[j]: number of the element at position j of the block; keys from 0, values from `count`.
    where = torch.zeros(2 * count, dtype=torch.int64)
    digit_value = 1
    while digit_value < 2 * count:
        cache = torch.zeros(1, num_kv_heads, block_size, 2 * head_size, dtype=dtype)
        key, value = (
            ((n // digit_value) % _BASE).expand(-1, num_kv_heads, -1).to(dtype).contiguous()
            for n in (number, number + count)
        )
        write(key, value, cache, slots)
        where += cache[0, num_kv_heads - 1].flatten().long() * digit_value
        digit_value *= _BASE
    if not torch.equal(where.sort().values, torch.arange(2 * count)):
        return None
    position = where.argsort()
    keys, values = (_operand(x) for x in position.view(2, block_size, head_size))
    return BlockLayout(keys, values) if keys and values else None


def _operand(position: torch.Tensor) -> _Operand | None:
    """Two-level strides that give ``position [block_size, D]``, or None."""
    offset = int(position[0, 0])
    token, channel = _axis(position[:, 0] - offset), _axis(position[0] - offset)
    if token is None or channel is None:
        return None
    additive = position[:, :1] + position[:1] - offset
    return _Operand(offset, token, channel) if torch.equal(additive, position) else None


def _axis(offsets: torch.Tensor) -> _Axis | None:
    """The two-level strides that give ``offsets [n]`` with the smallest inner run, or None."""
    size = len(offsets)
    index = torch.arange(size)
    for inner in (n for n in range(1, size + 1) if size % n == 0):
        outer_stride = int(offsets[inner]) if inner < size else 0
        inner_stride = int(offsets[1]) if inner > 1 else 0
        if torch.equal((index // inner) * outer_stride + (index % inner) * inner_stride, offsets):
            return _Axis(size, inner, outer_stride, inner_stride)
    return None
