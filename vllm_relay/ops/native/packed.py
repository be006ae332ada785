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
        source: layout of the KV cache.
        kv_heads, head_size, dtype: of the layer.
        table: int32, the segment's block ids.

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
        table: NDArray[np.int32],
    ) -> None:
        if not source.block_tokens or source.block_tokens % native.PIECE:
            raise ValueError(f"blocks of {source.block_tokens} tokens cannot be packed")
        self._tokens = len(table) * source.block_tokens
        self._heads = (kv_heads, head_size, dtype)
        self.layout, nbytes = native.loaded().packed(native.DTYPES[dtype], head_size, self._tokens)
        self._memory = torch.empty(2, kv_heads, nbytes, dtype=torch.uint8, device="cpu")
        self.layout.k.base, self.layout.v.base = (x.data_ptr() for x in self._memory)
        self.pack(source, table)

    def pack(self, source: native.Layout, table: NDArray[np.int32]) -> None:
        """Pack as many blocks as the segment is made of into its memory; ValueError for others."""
        if len(table) * source.block_tokens != self._tokens:
            raise ValueError(f"{len(table)} blocks in a segment of {self._tokens} tokens")
        kv_heads, head_size, dtype = self._heads
        library, table = native.loaded(), np.ascontiguousarray(table, dtype=np.int32)
        sequence = np.zeros(native.TABLE + 1, dtype=np.int64)
        sequence[native.KEYS], sequence[native.TABLE] = self._tokens, table.ctypes.data
        call = native.Call(
            dtype=native.DTYPES[dtype],
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

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values, uint8 ``[Hkv, bytes]``, in the order of tokens."""
        return self._memory[0], self._memory[1]

    def from_token(self, token: int) -> native.Layout:
        """Layout of the segment from this token on, a multiple of `native.PIECE`."""
        layout = native.Layout.from_buffer_copy(self.layout)
        _, head_size, dtype = self._heads
        layout.k.base += token * head_size * dtype.itemsize
        layout.v.base += token * head_size * dtype.itemsize
        return layout
