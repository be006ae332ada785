"""Self-test: a small batch through the kernels that relay runs on a device, against plain torch.

Once per layer shape, when the engine starts. FlashAttention 2 once returned the LSE of grouped
heads in another layout (vllm-project/flash-attention#87): partial outputs look right then, and
merged ones are wrong without an error.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import flash_attn

from vllm_relay.backend.cuda_impl import attend
from vllm_relay.ops import checks, reference
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
    """Parameters of a layer's kernels; names as in vLLM's FlashAttentionImpl and builder."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    fa_version: int
    softcap: float = 0.0
    max_seq_len: int = 0  # upper bound of lengths that calls are given
    max_num_splits: int = 0  # as in full CUDA graphs; 0: FlashAttention's choice
    dense: bool = False  # one group may be attended as dense KV


def refusal(impl: Any, device: torch.device, **engine: Any) -> str | None:
    """Why a layer, vLLM's FlashAttentionImpl, is not to be relayed: its kernels fail; or None.

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
    # One query per request and several; splits left to FlashAttention and given, as in graphs.
    for queries, repeat, splits in ((1, 1, 0), (3, 1, 0), (1, 8, layer.max_num_splits)):
        try:
            failures = _try(layer, device, queries, REQUESTS * repeat, splits)
        except Exception as error:
            failures = [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
        if failures:
            return tuple(dict.fromkeys(failures))
    return ()


def _try(
    layer: LayerShape, device: torch.device, queries: int, requests: tuple[Any, ...], splits: int
) -> list[str]:
    generator = torch.Generator().manual_seed(len(requests) + queries)
    size = layer.block_size
    lens = [shared * size + own + queries for _, shared, own in requests]
    columns = max(-(-n // size) for n in lens)
    segments: dict[str, list[int]] = {}
    unused = count(1)  # block 0 is padding
    table = []
    for group, blocks, _ in requests:
        if group not in segments:
            segments[group] = list(islice(unused, blocks))
        table.append([*segments[group], *islice(unused, columns - blocks)])
    # One row and one token of padding, as a CUDA graph has them.
    table.append([0] * columns)
    lens.append(0)
    owned = queries * len(requests)
    starts = [*range(0, owned + 1, queries), owned]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, layer.dtype)

    q = normal(owned + 1, layer.num_heads, layer.head_size)
    # Physically as vLLM's default: K and V of a token side by side.
    cache = normal(next(unused), size, layer.num_kv_heads, 2 * layer.head_size)
    keys, values = cache.split(layer.head_size, -1)
    block_table, seq_lens, query_start_loc = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (table, lens, starts)
    )
    planner = DevicePlan(
        max_rows=len(lens),
        max_tokens=len(q),
        max_blocks=columns,
        block_size=size,
        dense=layer.dense,
        device=device,
    )
    plan = planner.update(
        block_table,
        seq_lens,
        query_start_loc,
        num_tokens=len(q),
        max_query_len=queries,
        max_seq_len=max(*lens, layer.max_seq_len),
    )
    failures: list[str] = []

    def checked(
        part: Part[Tensor] | DensePart[Tensor], q: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> Tensor:
        scale, softcap = layer.head_size**-0.5, layer.softcap
        lse = attend(
            part, q, keys, values, out, scale=scale, softcap=softcap, fa_version=layer.fa_version
        )
        failures.extend(_wrong_partial(layer, part, (q, keys, values), out, lse))
        return lse

    out = torch.full_like(q, torch.nan)
    paged_relay(q, keys, values, _scheduled(plan, layer, splits), checked, out=out)
    exact, _ = reference.context_attention(
        q, keys, values, block_table, seq_lens, query_start_loc, softcap=layer.softcap
    )
    failures += _wrong("relay attention", out[:owned], exact[:owned], OUT_LIMIT)
    # Each group's blocks, read once instead of by every member.
    readers = [group for group, _, _ in requests]
    saved = sum((readers.count(x) - 1) * len(blocks) * size for x, blocks in segments.items())
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


def _wrong_partial(
    layer: LayerShape,
    part: Part[Tensor] | DensePart[Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
) -> list[str]:
    """Differences between a partial, out [T, Hq, D] and lse [Hq, T], and the same in float64."""
    name = "context attention" if part.causal else "system attention"
    q, keys, values = qkv
    if isinstance(part, DensePart):
        # Dense keys are a cache of blocks of one token.
        keys, values = keys[:, None], values[:, None]
        lens = part.key_start_loc.diff()
        table = part.key_start_loc[:-1, None] + torch.arange(int(lens.max()), device=lens.device)
    else:
        lens, table = part.seq_lens, part.block_table
    starts = part.query_start_loc
    exact, exact_lse = reference.context_attention(
        q, keys, values, table, lens, starts, causal=part.causal, softcap=layer.softcap
    )
    checks.shape(f"{name}: LSE", lse, tuple(exact_lse.shape), "[heads, tokens]")
    if lse.dtype != torch.float32:
        return [f"{name}: an LSE in {lse.dtype}, not float32"]
    seen = torch.isfinite(exact_lse)
    attended = seen.T.unsqueeze(-1)
    failures = _wrong(f"{name}, LSE", lse[seen], exact_lse[seen], LSE_LIMIT)
    failures += _wrong(name, out.where(attended, 0), exact.where(attended, 0), OUT_LIMIT)
    # +inf is read as -inf: nothing was attended. Tokens of padding stay unwritten.
    owned = int(starts[-1])
    if not lse[:, :owned].isinf()[~seen[:, :owned]].all():
        failures.append(f"{name}: an LSE that is finite where nothing was attended")
    return failures


def _wrong(name: str, got: Tensor, exact: Tensor, limit: float) -> list[str]:
    if got.numel() == 0:
        return []
    error = float((got.double() - exact).abs().nan_to_num(nan=torch.inf).max())
    return [] if error <= limit else [f"{name} is off by {error:.2g}, more than {limit}"]
