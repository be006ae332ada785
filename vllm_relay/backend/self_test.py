"""Self-test: a small batch through the kernels that relay runs on a device, against plain torch.

Once per layer shape, when the engine starts. FlashAttention 2 once returned the LSE of grouped
heads in another layout (vllm-project/flash-attention#87): partial outputs look right then, and
merged ones are wrong without an error.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, count, cycle, islice
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import flash_attn

from vllm_relay.backend.cuda_impl import attend
from vllm_relay.backend.cuda_support import has_fp8, window_of
from vllm_relay.ops import checks, reference
from vllm_relay.ops.planning.device_plan import DevicePlan
from vllm_relay.ops.planning.splits import processors_of
from vllm_relay.ops.step.paged import paged_relay
from vllm_relay.plan import DensePart, Part, Plan

# For values of about 1: two roundings of a partial to bfloat16 (2**-9 each), with room; with fp8,
# whose kernels round the weights of values, too (2**-4 each).
OUT_LIMIT, OUT_LIMIT_FP8 = 0.03, 0.2
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
    sinks: torch.dtype | None = None  # of the sinks, if any
    window: int = 0  # see `cuda_support.window_of`
    fp8: bool = False  # queries and cache are float8_e4m3fn; dtype is that of the output
    max_seq_len: int = 0  # upper bound of lengths that calls are given
    max_num_splits: int = 0  # as in full CUDA graphs; 0: FlashAttention's choice
    dense: bool = False  # one group may be attended as dense KV

    @property
    def out_limit(self) -> float:
        return OUT_LIMIT_FP8 if self.fp8 else OUT_LIMIT


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step of the test: its requests, as `REQUESTS`.

    Attributes:
        queries: of the requests, in turn. padding: rows without any. splits: of keys; 0: of
            FlashAttention's choice. scheduled: with schedules, which vLLM makes for version 3.
    """

    requests: tuple[Any, ...]
    queries: tuple[int, ...]
    padding: int = 1
    splits: int = 0
    scheduled: bool = False


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
        sinks=None if impl.sinks is None else impl.sinks.dtype,
        window=window_of(impl),
        fp8=has_fp8(impl),
        **engine,
    )
    failures = run(layer, device)
    return f"kernels that fail their self-test ({'; '.join(failures)})" if failures else None


@cache
def run(layer: LayerShape, device: torch.device) -> tuple[str, ...]:
    """Failures of the kernels of a layer shape on ``device``, a line each; an exception is one."""
    # One query per request and several, and a prompt beside them; splits left to FlashAttention and
    # given, as in graphs, with schedules and without. Rows of padding as a graph may have them: two
    # of three, and so many that FlashAttention 2 does not split keys; then it writes the LSE of a
    # row without keys over that of others.
    many, filling = REQUESTS * 4, _filling(device) // layer.num_kv_heads
    padding, given = max(2 * len(many), filling), layer.max_num_splits
    batches = [
        Batch(requests=REQUESTS, queries=(1,)),
        Batch(requests=REQUESTS, queries=(3,)),
        Batch(requests=REQUESTS, queries=(1, 1, 200)),
        Batch(requests=many, queries=(1,), padding=padding, splits=given),
    ]
    if layer.fa_version == 3:
        batches.append(replace(batches[-1], scheduled=True))
    for batch in batches:
        try:
            failures = _try(layer, device, batch)
        except Exception as error:
            failures = [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
        if failures:
            return tuple(dict.fromkeys(failures))
    return ()


def _filling(device: torch.device) -> int:
    """Tiles that fill a device; FlashAttention counts two per multiprocessor."""
    return 2 * processors_of(device) if device.type == "cuda" else 0


def _try(layer: LayerShape, device: torch.device, batch: Batch) -> list[str]:
    requests, padding = batch.requests, batch.padding
    generator = torch.Generator().manual_seed(len(requests) + sum(batch.queries))
    size = layer.block_size
    queries = list(islice(cycle(batch.queries), len(requests)))
    lens = [shared * size + own + n for (_, shared, own), n in zip(requests, queries, strict=True)]
    columns = max(-(-n // size) for n in lens)
    segments: dict[str, list[int]] = {}
    unused = count(1)  # block 0 is padding
    table = []
    for group, blocks, _ in requests:
        if group not in segments:
            segments[group] = list(islice(unused, blocks))
        table.append([*segments[group], *islice(unused, columns - blocks)])
    # Rows and tokens of padding, as a CUDA graph has them.
    table += [[0] * columns] * padding
    lens += [0] * padding
    owned = sum(queries)
    starts = [0, *accumulate(queries), *[owned] * padding]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, layer.dtype)

    q, scale = normal(owned + padding, layer.num_heads, layer.head_size), 1.0
    sinks = None if layer.sinks is None else normal(layer.num_heads).to(layer.sinks)
    # Physically as vLLM's default: K and V of a token side by side.
    cache = normal(next(unused), size, layer.num_kv_heads, 2 * layer.head_size)
    out = torch.full_like(q, torch.nan)
    if layer.fp8:
        scale = 0.5
        q, cache = ((x / scale).to(torch.float8_e4m3fn) for x in (q, cache))
    scales = [torch.tensor(scale, device=device)] * 3 if layer.fp8 else None
    keys, values = cache.split(layer.head_size, -1)

    def exactly(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.double() * scale, keys.double() * scale, values.double() * scale

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
        max_query_len=max(queries),
        max_seq_len=max(*lens, layer.max_seq_len),
    )
    failures: list[str] = []
    # All is inside of it: a longer row shares nothing.
    window = (max(layer.window, *lens) - 1, 0) if layer.window else (-1, -1)

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
            sinks=sinks,
            window=window,
            fa_version=layer.fa_version,
            scales=scales,
        )
        failures.extend(_wrong_partial(layer, part, exactly(q, keys, values), sinks, out, lse))
        return lse

    paged_relay(q, keys, values, _scheduled(plan, layer, window, batch), checked, out=out)
    scores: dict[str, Any] = {"softcap": layer.softcap, "sinks": sinks}
    exact, _ = reference.context_attention(
        *exactly(q, keys, values), block_table, seq_lens, query_start_loc, **scores
    )
    failures += _wrong("relay attention", out[:owned], exact[:owned], layer.out_limit)
    # Each group's blocks, read once instead of by every member.
    readers = [group for group, _, _ in requests]
    saved = sum((readers.count(x) - 1) * len(blocks) * size for x, blocks in segments.items())
    if planner.newest()[0].tokens_saved != saved:
        failures.append("the plan of a batch is not what its block table says")
    return failures


def _scheduled(
    plan: Plan[Tensor], layer: LayerShape, window: tuple[int, int], batch: Batch
) -> Plan[Tensor]:
    """The plan with splits, and with schedules where vLLM would make them."""

    def schedule(part: Part[Tensor]) -> Part[Tensor]:
        if not batch.scheduled:
            return replace(part, num_splits=batch.splits)
        made = flash_attn.get_scheduler_metadata(
            batch_size=len(part.seq_lens),
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_seq_len,
            num_heads_q=layer.num_heads,
            num_heads_kv=layer.num_kv_heads,
            headdim=layer.head_size,
            cache_seqlens=part.seq_lens,
            qkv_dtype=torch.float8_e4m3fn if layer.fp8 else layer.dtype,
            cu_seqlens_q=part.query_start_loc,
            page_size=layer.block_size,
            causal=part.causal,
            window_size=window if part.causal else (-1, -1),
            num_splits=batch.splits,
        )
        return replace(part, num_splits=batch.splits, scheduler_metadata=made)

    return replace(
        plan,
        levels=[schedule(part) for part in plan.levels],
        context=schedule(plan.context),
        dense=plan.dense and replace(plan.dense, num_splits=batch.splits),
    )


def _wrong_partial(
    layer: LayerShape,
    part: Part[Tensor] | DensePart[Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
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
    scores: dict[str, Any] = {"softcap": layer.softcap, "sinks": sinks if part.causal else None}
    exact, exact_lse = reference.context_attention(
        q, keys, values, table, lens, starts, causal=part.causal, **scores
    )
    checks.shape(f"{name}: LSE", lse, tuple(exact_lse.shape), "[heads, tokens]")
    if lse.dtype != torch.float32:
        return [f"{name}: an LSE in {lse.dtype}, not float32"]
    seen = torch.isfinite(exact_lse)
    attended = seen.T.unsqueeze(-1)
    failures = _wrong(f"{name}, LSE", lse[seen], exact_lse[seen], LSE_LIMIT)
    failures += _wrong(name, out.where(attended, 0), exact.where(attended, 0), layer.out_limit)
    # +inf is read as -inf: nothing was attended. Tokens of no sequence stay unwritten.
    owned = slice(int(starts[0]), int(starts[-1]))
    if not lse[:, owned].isinf()[~seen[:, owned]].all():
        failures.append(f"{name}: an LSE that is finite where nothing was attended")
    return failures


def _wrong(name: str, got: Tensor, exact: Tensor, limit: float) -> list[str]:
    if got.numel() == 0:
        return []
    error = float((got.double() - exact).abs().nan_to_num(nan=torch.inf).max())
    return [] if error <= limit else [f"{name} is off by {error:.2g}, more than {limit}"]
