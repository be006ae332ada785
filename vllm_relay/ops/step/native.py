"""The attention of a whole step on the CPU kernels: laid out once, run for every layer.

All levels and contexts are one call: its work is divided among the threads as a whole, and the
partials are fused where they belong. No tensor is gathered or allocated per layer.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_relay.ops.native import library as native


class StepAttention:
    """Sequences of a step, each one partial of adjacent query tokens.

    Args:
        sequences: int64 ``[n, 7]``, see `native`; layout 0 is the KV cache, the others are dense
            segments. Query tokens that none of a partial's sequences has are left out of it.
        keep: what the addresses in sequences point to.
        places: int64 ``[N]``, where each query token is in the batch; None: where it stands.
        tokens: N. partials: of each token, at most. segments: dense layouts.
        heads, kv_heads, head_size, dtype, scale: of the layers.
    """

    def __init__(
        self,
        sequences: NDArray[np.int64],
        keep: Sequence[object],
        places: Tensor | None,
        *,
        tokens: int,
        partials: int,
        segments: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        self._library = native.loaded()
        self._kept = (sequences, keep, places)
        self._layouts = (native.Layout * (1 + segments))()
        self._out = torch.empty(partials, tokens, heads, head_size)
        self._lse = torch.empty(partials, heads, tokens)
        self._call = native.Call(
            dtype=native.DTYPES[dtype],
            out_dtype=native.DTYPES[torch.float32],
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            tokens=tokens,
            partials=partials,
            threads=torch.get_num_threads(),
            scale=scale,
            places=None if places is None else places.data_ptr(),
            out=self._out.data_ptr(),
            out_partial=self._out.stride(0),
            out_token=self._out.stride(1),
            out_head=self._out.stride(2),
            lse=self._lse.data_ptr(),
            lse_partial=self._lse.stride(0),
            lse_head=self._lse.stride(1),
            lse_token=self._lse.stride(2),
            layouts=self._layouts,
            sequences=sequences.ctypes.data,
            num_layouts=len(self._layouts),
            num_sequences=len(sequences),
            parallel=self._library.parallel,
        )

    def run(
        self, query: Tensor, cache: native.Layout, segments: Sequence[native.Layout], out: Tensor
    ) -> None:
        """Attend and fuse, for one layer.

        Args:
            query, out: ``[T, Hq, D]`` of the batch, channels adjacent; out is written at the
                step's places only. cache, segments: where this layer's keys and values lie.

        Raises:
            ValueError: a block id lies outside the cache.
        """
        call = self._call
        self._layouts[0] = cache
        for index, segment in enumerate(segments):
            self._layouts[1 + index] = segment
        call.q, call.q_token, call.q_head = query.data_ptr(), query.stride(0), query.stride(1)
        call.fused, call.fused_token, call.fused_head = out.data_ptr(), out.stride(0), out.stride(1)
        self._library.attend(call)
