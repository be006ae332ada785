"""Packed segments: keys and values in the order in which the CPU kernels multiply them."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_relay.ops.native import library as native


class PackedSegment:
    """Packed keys and values of one segment of one layer, for the instruction set in use.

    Args:
        source: layout of the keys and values to copy.
        kv_heads, head_size, dtype: of the layer.
        tokens: of the segment.
        table: int32 ``[ceil(tokens / block_tokens)]``, the segment's block ids if source is paged.

    Raises:
        ValueError: there are no kernels, a block id lies outside the KV cache, or the block size
            is no multiple of `native.PIECE`.
    """

    def __init__(
        self,
        source: native.Layout,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        tokens: int,
        table: NDArray[np.int32] | None = None,
    ) -> None:
        if source.block_tokens % native.PIECE:
            raise ValueError(f"blocks of {source.block_tokens} tokens cannot be packed")
        library, code = native.loaded(), native.DTYPES[dtype]
        self.layout, nbytes = library.packed(code, head_size, tokens)
        self._memory = torch.empty(2 * kv_heads * nbytes, dtype=torch.uint8)
        self.layout.k.base = self._memory.data_ptr()
        self.layout.v.base = self._memory.data_ptr() + kv_heads * nbytes
        self._kv_heads = kv_heads
        self._bytes_per_token = head_size * dtype.itemsize
        sequence = np.zeros(native.TABLE + 1, dtype=np.int64)
        sequence[native.KEYS] = tokens
        if table is not None:
            table = np.ascontiguousarray(table, dtype=np.int32)
            sequence[native.TABLE] = table.ctypes.data
        call = native.Call(
            dtype=code,
            kv_heads=kv_heads,
            head_size=head_size,
            threads=torch.get_num_threads(),
            layouts=ctypes.pointer(source),
            sequences=sequence.ctypes.data,
            num_layouts=1,
            num_sequences=1,
            parallel=library.parallel,
        )
        library.pack(call, self.layout)

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values, uint8 ``[Hkv, bytes]``, in the order of tokens."""
        keys, values = self._memory.view(2, self._kv_heads, -1)
        return keys, values

    def from_token(self, token: int) -> native.Layout:
        """Layout of the segment from this token on, a multiple of `native.PIECE`."""
        layout = native.Layout.from_buffer_copy(self.layout)
        layout.k.base += token * self._bytes_per_token
        layout.v.base += token * self._bytes_per_token
        return layout
