"""A small batch through the kernels that relay runs on this device, compared with plain torch.

Done once per shape of layer when the engine starts. FlashAttention 2 once returned the LSE of
grouped heads in another layout (vllm-project/flash-attention#87): outputs alone look right then,
and merged ones are wrong without an error. Not yet run on a GPU.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import flash_attn

from vllm_relay.ops import reference
from vllm_relay.ops.planning.device_plan import DensePart, DevicePlan, Part
from vllm_relay.ops.step.paged import paged_relay

# Of values of about 1: two roundings of a partial to bfloat16 (2**-9 each), with room.
OUT_LIMIT = 0.03
LSE_LIMIT = 0.01
# Blocks that a row shares with the rows of the same letter, then its own tokens. Groups of two
# depths, out of order, and one that stands alone.
ROWS = (("a", 5, 37), ("b", 3, 1), ("a", 5, 80), ("", 0, 50), ("a", 5, 1), ("b", 3, 16))


@dataclass(frozen=True)
class Case:
    """What the kernels depend on; names as in vLLM's FlashAttentionImpl and its builder.

    Attributes:
        max_seq_len: upper bound of lengths that calls are given. max_num_splits: as in full CUDA
            graphs; 0 for none. dense: whether one group may be attended as dense KV.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    fa_version: int
    softcap: float = 0.0
    max_seq_len: int = 0
    max_num_splits: int = 0
    dense: bool = False


@cache
def run(case: Case, device: torch.device) -> tuple[str, ...]:
    """Try the kernels of a layer's shape on ``device``.

    Returns:
        What is wrong, a line each; empty when all is well. An exception is a failure, too.
    """
    failures: list[str] = []
    # One query per row and several, FlashAttention left alone and told how to split as in graphs.
    for queries, repeat, splits in ((1, 1, 0), (3, 1, 0), (1, 8, case.max_num_splits)):
        try:
            failures += _try(case, device, queries, ROWS * repeat, splits)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if failures:
            break
    return tuple(dict.fromkeys(failures))


def _try(
    case: Case, device: torch.device, queries: int, rows: tuple[Any, ...], splits: int
) -> list[str]:
    generator = torch.Generator().manual_seed(len(rows) + queries)
    size = case.block_size
    lens = [shared * size + own + queries for _, shared, own in rows]
    columns = max(-(-n // size) for n in lens)
    table, num_blocks = _blocks(rows, columns)
    # One row and one token of padding, as a CUDA graph has them.
    lens.append(0)
    starts = [queries * row for row in range(len(rows) + 1)]
    starts.append(starts[-1])
    tokens = starts[-1] + 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    q = normal(tokens, case.num_heads, case.head_size)
    # Physically as vLLM's default: K and V of a token side by side.
    cache = normal(num_blocks, size, case.num_kv_heads, 2 * case.head_size)
    keys, values = cache.split(case.head_size, -1)
    block_table, seq_lens, query_start_loc = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (table, lens, starts)
    )
    plan = DevicePlan(
        max_rows=len(lens),
        max_tokens=tokens,
        max_blocks=columns,
        block_size=size,
        dense=case.dense,
        device=device,
    )
    step = plan.update(
        block_table,
        seq_lens,
        query_start_loc,
        num_tokens=tokens,
        max_query_len=queries,
        max_seq_len=max(*lens, case.max_seq_len),
    )
    failures: list[str] = []

    def attend(
        part: Part | DensePart, q: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> Tensor:
        lse: Tensor = flash_attn.flash_attn_varlen_func(
            q=q,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=part.query_start_loc,
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_seq_len,
            softmax_scale=case.head_size**-0.5,
            causal=part.causal,
            softcap=case.softcap,
            fa_version=case.fa_version,
            return_softmax_lse=True,
            num_splits=splits,
            **_keys_of(case, part, splits),
        )[1]
        name = "context attention" if part.causal else "system attention"
        failures.extend(_wrong_part(case, name, part, (q, keys, values), out, lse))
        return lse

    out = torch.full_like(q, torch.nan)
    paged_relay(q, keys, values, step, attend, out=out)
    whole = Part(query_start_loc, seq_lens, block_table, queries, max(lens), causal=True)
    exact = _exact(case, whole, q, keys, values)[0]
    failures += _wrong("relay attention", out[: starts[-1]], exact[: starts[-1]], OUT_LIMIT)
    # Each letter's blocks, read once instead of by every row that has them.
    shared = {letter: blocks for letter, blocks, _ in rows if letter}
    readers = [letter for letter, _, _ in rows]
    saved = sum((readers.count(letter) - 1) * n * size for letter, n in shared.items())
    if plan.buffers.report[3].item() != saved:
        failures.append("the plan of a batch is not what its block table says")
    return failures


def _keys_of(case: Case, part: Part | DensePart, splits: int) -> dict[str, Any]:
    """Which keys a call attends to, with a schedule where vLLM would make one."""
    if isinstance(part, DensePart):
        return {"cu_seqlens_k": part.key_start_loc}
    keys: dict[str, Any] = {"seqused_k": part.seq_lens, "block_table": part.block_table}
    if case.fa_version == 3 and splits:
        keys["scheduler_metadata"] = flash_attn.get_scheduler_metadata(
            batch_size=len(part.seq_lens),
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_seq_len,
            num_heads_q=case.num_heads,
            num_heads_kv=case.num_kv_heads,
            headdim=case.head_size,
            cache_seqlens=part.seq_lens,
            qkv_dtype=case.dtype,
            cu_seqlens_q=part.query_start_loc,
            page_size=case.block_size,
            causal=part.causal,
            window_size=(-1, -1),
            num_splits=splits,
        )
    return keys


def _blocks(rows: tuple[Any, ...], columns: int) -> tuple[list[list[int]], int]:
    """Block table of the rows and one of padding, and how many blocks there are; 0 is none's."""
    shared: dict[str, list[int]] = {}
    table, fresh = [], 1
    for letter, blocks, _ in rows:
        if letter and letter not in shared:
            shared[letter] = list(range(fresh, fresh + blocks))
            fresh += blocks
        own = columns - blocks
        table.append([*shared.get(letter, []), *range(fresh, fresh + own)])
        fresh += own
    return [*table, [0] * columns], fresh


def _wrong_part(
    case: Case,
    name: str,
    part: Part | DensePart,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
) -> list[str]:
    exact, exact_lse = _exact(case, part, *qkv)
    if lse.shape != exact_lse.shape or lse.dtype != torch.float32:
        return [f"{name}: LSE is {lse.dtype} {list(lse.shape)}, not [heads, tokens] in float32"]
    seen = torch.isfinite(exact_lse)
    # +inf is read as -inf: nothing was seen.
    empty = ~torch.isinf(lse[~seen])
    attended = seen.T.unsqueeze(-1)
    failures = _wrong(f"{name}, LSE", lse[seen], exact_lse[seen], LSE_LIMIT)
    failures += _wrong(name, out.where(attended, 0), exact.where(attended, 0), OUT_LIMIT)
    owned = torch.zeros_like(seen)
    for begin, end in pairwise(part.query_start_loc.tolist()):
        owned[:, begin:end] = True
    if bool((empty & owned[~seen]).any()):
        failures.append(f"{name}: an LSE that is finite where nothing was attended")
    return failures


def _wrong(name: str, got: Tensor, exact: Tensor, limit: float) -> list[str]:
    if got.numel() == 0:
        return []
    error = float((got.double() - exact).abs().nan_to_num(nan=torch.inf).max())
    return [] if error <= limit else [f"{name} is off by {error:.2g}, more than {limit}"]


def _exact(
    case: Case, part: Part | DensePart, q: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The call in float64: out [T, Hq, D], lse [Hq, T]."""
    if isinstance(part, DensePart):
        # Dense keys are a cache of blocks of one token.
        keys, values = keys[:, None], values[:, None]
        lens = part.key_start_loc.diff()
        columns = torch.arange(int(lens.max()), device=lens.device)
        table = part.key_start_loc[:-1, None] + columns
    else:
        lens, table = part.seq_lens, part.block_table
    return reference.context_attention(
        q,
        keys,
        values,
        table,
        lens,
        part.query_start_loc,
        causal=part.causal,
        softcap=case.softcap,
    )
