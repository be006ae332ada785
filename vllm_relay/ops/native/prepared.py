"""Calls of the C++ CPU kernels that are laid out once, with the arrays that they point to."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.library import Call, Layout, Partial


class PreparedAttention:
    """Attention of sequences, laid out once; `layouts` is filled before a run.

    Args:
        sequences: int64 ``[n, 7]``, see `native`; the caller keeps their block tables.
        out: ``[P, T, Hq, D]``, memory for the partials.
        kv_heads, dtype, scale: of the queries' attention.
        places: int64 ``[T]``, the row of each token in the query; None: in order.
    """

    def __init__(
        self,
        sequences: NDArray[np.int64],
        out: Tensor,
        *,
        kv_heads: int,
        dtype: torch.dtype,
        scale: float,
        layouts: int = 1,
        places: NDArray[np.int64] | None = None,
    ) -> None:
        partials, tokens, heads, head_size = out.shape
        self.out = out
        self.lse = torch.empty((partials, heads, tokens), dtype=torch.float32, device="cpu")
        self.layouts = (Layout * layouts)()
        self.sequences, self._places = sequences, places
        self._library = native.loaded()
        self._call = Call(
            dtype=native.DTYPES[dtype],
            partial_dtype=native.DTYPES[out.dtype],
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            tokens=tokens,
            threads=torch.get_num_threads(),
            scale=scale,
            places=None if places is None else places.ctypes.data,
            partials=Partial.array(out, self.lse),
            layouts=self.layouts,
            sequences=sequences.ctypes.data,
            num_partials=partials,
            num_layouts=layouts,
            num_sequences=len(sequences),
            parallel=self._library.parallel,
        )
        self._query, self._fused = self._call.q, self._call.fused  # views of the call

    def run(self, query: Tensor, fused: Tensor | None = None) -> None:
        """Attend and, into `fused`, merge the partials; both ``[T, Hq, D]``, channels adjacent."""
        rows = self._query
        rows.base, rows.token, rows.head = query.data_ptr(), query.stride(0), query.stride(1)
        rows = self._fused
        rows.base = None if fused is None else fused.data_ptr()
        if fused is not None:
            rows.token, rows.head = fused.stride(0), fused.stride(1)
        self._library.attend(self._call)
