"""Self-test: a small batch through the kernels that relay runs on a device, against plain torch.

Once per layer shape, when the engine starts. FlashAttention 2 once returned the LSE of grouped
heads in another layout (vllm-project/flash-attention#87): partial outputs look right then, and
merged ones are wrong without an error.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import flash_attn

from vllm_relay.backend.cuda_impl import attend
from vllm_relay.ops import reference
from vllm_relay.ops.planning.device_plan import DevicePlan
from vllm_relay.ops.step.paged import paged_relay
from vllm_relay.plan import DensePart, Part, Plan

# For values of about 1: two roundings of a partial to bfloat16 (2**-9 each), with room.
OUT_LIMIT = 0.03
LSE_LIMIT = 0.01
# Requests: group, blocks shared with it, own tokens. Groups of two depths, out of order, and one
# request alone.
REQUESTS = (("a", 5, 37), ("b", 3, 1), ("a", 5, 80), ("", 0, 50), ("a", 5, 1), ("b", 3, 16))


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Parameters of a layer's kernels; names as in vLLM's FlashAttentionImpl and builder.

    Attributes:
        max_seq_len: upper bound of lengths that calls are given. max_num_splits: as in full CUDA
            graphs; 0: FlashAttention's choice. dense: one group may be attended as dense KV.
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


def refusal(impl: Any, device: torch.device, **engine: Any) -> str | None:
    """Why a layer, vLLM's FlashAttentionImpl, is not to be relayed: its kernels fail; or None.

    Args:
        engine: the fields of `LayerShape` that the layer does not know.
    """
    layer = LayerShape(
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        fa_version=impl.vllm_flash_attn_version,
        softcap=float(impl.logits_soft_cap),
        **engine,
    )
    failures = run(layer, device)
    return f"kernels that fail their self-test ({'; '.join(failures)})" if failures else None


@cache
def run(layer: LayerShape, device: torch.device) -> tuple[str, ...]:
    """Failures of the kernels of a layer shape on ``device``, a line each; an exception is one."""
    failures: list[str] = []
    # One query per request and several; splits left to FlashAttention and given, as in graphs.
    for queries, repeat, splits in ((1, 1, 0), (3, 1, 0), (1, 8, layer.max_num_splits)):
        try:
            failures += _try(layer, device, queries, REQUESTS * repeat, splits)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if failures:
            break
    return tuple(dict.fromkeys(failures))


def _try(
    layer: LayerShape, device: torch.device, queries: int, requests: tuple[Any, ...], splits: int
) -> list[str]:
    generator = torch.Generator().manual_seed(len(requests) + queries)
    size = layer.block_size
    lens = [shared * size + own + queries for _, shared, own in requests]
    columns = max(-(-n // size) for n in lens)
    table, num_blocks = _block_table(requests, columns)
    # One row and one token of padding, as a CUDA graph has them.
    lens.append(0)
    starts = [queries * row for row in range(len(requests) + 1)]
    starts.append(starts[-1])
    tokens = starts[-1] + 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, layer.dtype)

    q = normal(tokens, layer.num_heads, layer.head_size)
    # Physically as vLLM's default: K and V of a token side by side.
    cache = normal(num_blocks, size, layer.num_kv_heads, 2 * layer.head_size)
    keys, values = cache.split(layer.head_size, -1)
    block_table, seq_lens, query_start_loc = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (table, lens, starts)
    )
    planner = DevicePlan(
        max_rows=len(lens),
        max_tokens=tokens,
        max_blocks=columns,
        block_size=size,
        dense=layer.dense,
        device=device,
    )
    plan = planner.update(
        block_table,
        seq_lens,
        query_start_loc,
        num_tokens=tokens,
        max_query_len=queries,
        max_seq_len=max(*lens, layer.max_seq_len),
    )
    failures: list[str] = []

    def checked(
        part: Part[Tensor] | DensePart[Tensor], q: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> Tensor:
        lse = attend(
            part,
            q,
            keys,
            values,
            out,
            scale=layer.head_size**-0.5,
            softcap=layer.softcap,
            fa_version=layer.fa_version,
        )
        failures.extend(_wrong_partial(layer, part, (q, keys, values), out, lse))
        return lse

    out = torch.full_like(q, torch.nan)
    paged_relay(q, keys, values, _scheduled(plan, layer, splits), checked, out=out)
    whole = replace(plan.context, seq_lens=seq_lens, block_table=block_table, max_seq_len=max(lens))
    exact = _exact(layer, whole, q, keys, values)[0]
    failures += _wrong("relay attention", out[: starts[-1]], exact[: starts[-1]], OUT_LIMIT)
    # Each group's blocks, read once instead of by every member.
    shared = {group: blocks for group, blocks, _ in requests if group}
    readers = [group for group, _, _ in requests]
    saved = sum((readers.count(group) - 1) * n * size for group, n in shared.items())
    if planner.newest()[0].tokens_saved != saved:
        failures.append("the plan of a batch is not what its block table says")
    return failures


def _scheduled(plan: Plan[Tensor], layer: LayerShape, splits: int) -> Plan[Tensor]:
    """The plan with splits, and with schedules where vLLM would make them."""

    def schedule(part: Part[Tensor]) -> Part[Tensor]:
        if layer.fa_version != 3 or not splits:
            return replace(part, num_splits=splits)
        made = flash_attn.get_scheduler_metadata(
            batch_size=len(part.seq_lens),
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_seq_len,
            num_heads_q=layer.num_heads,
            num_heads_kv=layer.num_kv_heads,
            headdim=layer.head_size,
            cache_seqlens=part.seq_lens,
            qkv_dtype=layer.dtype,
            cu_seqlens_q=part.query_start_loc,
            page_size=layer.block_size,
            causal=part.causal,
            window_size=(-1, -1),
            num_splits=splits,
        )
        return replace(part, num_splits=splits, scheduler_metadata=made)

    return replace(
        plan,
        levels=[schedule(part) for part in plan.levels],
        context=schedule(plan.context),
        dense=plan.dense and replace(plan.dense, num_splits=splits),
    )


def _block_table(requests: tuple[Any, ...], columns: int) -> tuple[list[list[int]], int]:
    """Block table of the requests and a row of padding, and the number of blocks; 0 is unused."""
    shared: dict[str, list[int]] = {}
    table, fresh = [], 1
    for group, blocks, _ in requests:
        if group and group not in shared:
            shared[group] = list(range(fresh, fresh + blocks))
            fresh += blocks
        own = columns - blocks
        table.append([*shared.get(group, []), *range(fresh, fresh + own)])
        fresh += own
    return [*table, [0] * columns], fresh


def _wrong_partial(
    layer: LayerShape,
    part: Part[Tensor] | DensePart[Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
) -> list[str]:
    name = "context attention" if part.causal else "system attention"
    exact, exact_lse = _exact(layer, part, *qkv)
    if lse.shape != exact_lse.shape or lse.dtype != torch.float32:
        return [f"{name}: LSE is {lse.dtype} {list(lse.shape)}, not [heads, tokens] in float32"]
    seen = torch.isfinite(exact_lse)
    # +inf is read as -inf: nothing was attended.
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
    layer: LayerShape,
    part: Part[Tensor] | DensePart[Tensor],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
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
        softcap=layer.softcap,
    )
