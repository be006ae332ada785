"""Calls of the C++ CPU kernels that are laid out once, with the arrays that they point to."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.library import Call, Layout, Partial, Rows, Scores


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of a layer: its heads, and how scores are made of products.

    A score is ``softcap * tanh(q.k * scale / softcap)``, or ``q.k * scale`` where softcap is 0.

    Attributes:
        heads, kv_heads, head_size, dtype: of queries, keys and values.
        window: tokens up to the query's own that it sees; 0: all.
    """

    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    scale: float
    softcap: float = 0.0
    window: int = 0


class PreparedAttention:
    """Attention of sequences, laid out once; `layouts` is filled before a run.

    One partial is written to the output itself, several are float32 and fused into it.

    Args:
        sequences: int64 ``[n, 8]``, see `native`; the caller keeps their block tables.
        tokens: T, queries of the call.
        places: int64 ``[T]``, the row of each token in the query; None: in order.
        positions: int64 ``[T]``, of each token; needed with a window or slopes.
        lse: whether one partial has an LSE; several have.

    Attributes:
        sequences, positions: as given; changes of them count in the next run.
        out: float32 ``[P, T, Hq, D]`` of several partials. lse: float32 ``[P, Hq, T]``.
    """

    def __init__(
        self,
        sequences: NDArray[np.int64],
        tokens: int,
        shape: AttentionShape,
        *,
        partials: int = 1,
        layouts: int = 1,
        places: NDArray[np.int64] | None = None,
        positions: NDArray[np.int64] | None = None,
        lse: bool = False,
    ) -> None:
        self.shape = (tokens, shape.heads, shape.head_size)
        self.layouts = (Layout * layouts)()
        self.sequences, self._places, self.positions = sequences, places, positions
        self._library = native.loaded()
        with_lse = lse or partials > 1
        self.lse = torch.empty(
            (partials * with_lse, shape.heads, tokens), dtype=torch.float32, device="cpu"
        )
        self.out: Tensor | None = None
        if partials > 1:
            self.out = torch.empty((partials, *self.shape), dtype=torch.float32, device="cpu")
            self._partials = Partial.array(self.out, self.lse)
        else:
            rows = Rows(self.lse.data_ptr(), self.lse.stride(2), self.lse.stride(1))
            self._partials = (Partial * 1)(Partial(Rows(), rows if lse else Rows()))
        dtype = native.DTYPES[shape.dtype]
        self._call = Call(
            dtype=dtype,
            partial_dtype=dtype if self.out is None else native.DTYPES[torch.float32],
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            tokens=tokens,
            threads=torch.get_num_threads(),
            scores=Scores(scale=shape.scale, softcap=shape.softcap, window=shape.window),
            places=None if places is None else places.ctypes.data,
            positions=None if positions is None else positions.ctypes.data,
            partials=self._partials,
            layouts=self.layouts,
            sequences=sequences.ctypes.data,
            num_partials=partials,
            num_layouts=layouts,
            num_sequences=len(sequences),
            parallel=self._library.parallel,
        )
        # Views of the call.
        self._query, self._scores = self._call.q, self._call.scores
        self._out = self._partials[0].out if self.out is None else self._call.fused

    def run(
        self,
        query: Tensor,
        out: Tensor,
        *,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend; the result goes into ``out``. Both are ``[T, Hq, D]``, channels adjacent.

        Args:
            slopes: float32 ``[Hq]``, ALiBi's. sinks: float32 ``[Hq]``, logits of the layer's sinks.
        """
        for rows, x in ((self._query, query), (self._out, out)):
            rows.base, rows.token, rows.head = x.data_ptr(), x.stride(0), x.stride(1)
        self._scores.slopes = None if slopes is None else slopes.data_ptr()
        self._scores.sinks = None if sinks is None else sinks.data_ptr()
        self._library.attend(self._call)
