"""Synthetic steps: who shares what, as block tables and as the model runner describes a step."""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass(frozen=True)
class Shape:
    """A step of equal groups.

    Attributes:
        rows: requests. shared: tokens of each group's prefix, in whole blocks. own: of each request
            after it.
        queries: of each request, the last of its own tokens. groups: equal shares of the requests;
            0: nothing is shared.
        prefill: tokens of one more request, which shares nothing: all of them are queries.
    """

    rows: int
    shared: int
    own: int
    queries: int = 1
    groups: int = 1
    prefill: int = 0


def tables_of(shape: Shape, block: int) -> tuple[np.ndarray, int]:
    """Block tables and the last block; own blocks first, then those of the groups.

    Raises:
        ValueError: a prefix that is not in whole blocks of ``block`` tokens.
    """
    if shape.shared % block:
        raise ValueError(f"shared: expected a multiple of {block}, got {shape.shared}")
    shared, own = shape.shared // block, -(-shape.own // block)
    groups = shape.groups or shape.rows
    rows = np.arange(shape.rows)
    mine = 1 + rows[:, None] * own + np.arange(own)
    of_group = rows * groups // shape.rows
    prefix = 1 + shape.rows * own + of_group[:, None] * shared + np.arange(shared)
    tables = np.concatenate([prefix, mine], axis=1).astype(np.int32)
    if shape.prefill:
        more = tables.max() + 1 + np.arange(-(-shape.prefill // block), dtype=np.int32)
        width = max(tables.shape[1], len(more))
        tables = np.array([np.resize(row, width) for row in (*tables, more)])
    return tables, int(tables.max())


def describe(
    shape: Shape, block: int, device: torch.device | str = "cpu"
) -> CommonAttentionMetadata:
    """A step's metadata, its tensors on ``device``."""
    tables, _ = tables_of(shape, block)
    lens = np.full(shape.rows, shape.shared + shape.own, dtype=np.int32)
    queries = np.full(shape.rows, shape.queries, dtype=np.int32)
    if shape.prefill:
        more = np.int32(shape.prefill)
        lens, queries = np.append(lens, more), np.append(queries, more)
    tokens = int(queries.sum())
    starts = torch.from_numpy(np.cumsum([0, *queries], dtype=np.int32))
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.from_numpy(lens).to(device),
        num_reqs=len(lens),
        num_actual_tokens=tokens,
        max_query_len=int(queries.max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=torch.from_numpy(tables).to(device),
        slot_mapping=torch.full((tokens,), -1, device=device),
    )
