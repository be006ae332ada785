"""Inputs and tolerances shared by the op tests."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_relay.ops import reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEADS = [(4, 4), (6, 2), (5, 1)]  # MHA, GQA, MQA
HEAD_SIZES = [32, 64, 80, 96, 112, 128, 256]
NAN, INF = float("nan"), float("inf")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values whose scores have a deviation of about 2, as in trained models."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 1.4).to(dtype)


def stock(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **scores: Any) -> Tensor:
    """Torch's own attention in the inputs' dtype, on [T, H, D]; causal aligned to the end.

    ``scores``: of `reference.attention_lse`, which torch's has not: then products and softmax in
    float32, and weights in the inputs' dtype, as vLLM's kernel has them.
    """
    if scores:
        return _stock_scores(q, k, v, causal, scores)
    tokens, keys = q.shape[0], k.shape[0]
    mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens) if causal else None
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None].contiguous(),
        k.transpose(0, 1)[None].contiguous(),
        v.transpose(0, 1)[None].contiguous(),
        attn_mask=mask,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _stock_scores(q: Tensor, k: Tensor, v: Tensor, causal: bool, scores: dict[str, Any]) -> Tensor:
    values = torch.eye(len(k))[:, None].expand(-1, k.shape[1], -1)
    weights, _ = reference.attention_lse(  # [T, H, S]: the values are unit vectors
        q, k, values, causal=causal, dtype=torch.float32, **scores
    )
    grouped = weights.to(q.dtype).unflatten(1, (k.shape[1], -1)).float()
    return torch.einsum("thgs,shd->thgd", grouped, v.float()).flatten(1, 2).to(q.dtype)


def assert_as_good(got: Tensor, stock: Tensor, exact: Tensor, partial: float = 0.0) -> None:
    """`got` is at most twice as far from `exact` (float64) as `stock`, the usual kernel.

    Holds for the largest error and for the root mean square. partial: largest value of the partials
    that were stored in got's dtype on the way, one rounding that stock has not.
    """
    assert got.dtype == stock.dtype
    if got.numel() == 0:
        assert got.shape == exact.shape
        return
    # A GEMM may add the D <= 512 products of a score in any order, and picks one by shape: 64
    # float32 roundings of the largest value. A 64th of float16's own rounding.
    floor = 64 * 2**-24 * float(exact.abs().max())
    rounding = torch.finfo(got.dtype).eps / 2 * partial
    assert error(got, exact) <= 2 * error(stock, exact) + floor + rounding
    assert spread(got, exact) <= 2 * spread(stock, exact) + floor


def assert_lse(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """`got` is float32 and natural, -inf exactly where `exact` is, close elsewhere."""
    assert got.dtype == torch.float32
    assert got.shape == exact.shape
    seen = ~torch.isneginf(exact)
    assert torch.equal(~torch.isneginf(got), seen)
    if not seen.any():
        return
    # The D <= 512 products of a score are added one after another: sqrt(512) roundings of the
    # largest lse, about.
    limit = 24 * 2**-24 * max(8.0, float(exact[seen].abs().max()))
    if dtype != torch.float32:
        # Torch's CPU kernel keeps 15 bits of the sum here. An lse off by e scales a partial by
        # 1 + e: 2**-14 is an eighth of float16's rounding.
        limit = max(limit, 2**-14)
    assert error(got[seen], exact[seen]) <= limit


def error(got: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; infinite where a NaN is found."""
    assert got.shape == exact.shape
    worst = (got.double() - exact.double()).abs().nan_to_num(nan=INF)
    return float(worst.max())


def spread(got: Tensor, exact: Tensor) -> float:
    """Root mean square difference."""
    return float((got.double() - exact.double()).square().mean().sqrt())


@dataclass
class Paged:
    """One step over a paged cache; fields as the arguments of `context_attention`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    query_start_loc: Tensor

    def args(self) -> tuple[Tensor, ...]:
        """In the order of the call."""
        tables = (self.block_table, self.context_lens, self.query_start_loc)
        return (self.q, self.k_cache, self.v_cache, *tables)

    def row(self, r: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of one row, gathered."""
        n, size = int(self.context_lens[r]), self.k_cache.shape[1]
        ids = self.block_table[r, : -(-n // size)].long()
        start, end = self.query_start_loc[r : r + 2].tolist()
        k, v = (cache[ids].flatten(0, 1)[:n] for cache in (self.k_cache, self.v_cache))
        return self.q[start:end], k, v


def paged(
    context_lens: list[int],
    query_lens: list[int],
    *,
    heads: tuple[int, int] = (6, 2),
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "tokens",
    seed: int = 0,
) -> Paged:
    """Rows over shuffled blocks. Every slot no row owns holds NaN and unused columns a bad id.

    layout: memory order of the caches: "tokens" [block, token, head, dim], "heads" [block, head,
    token, dim], "turned" keys [block, head, dim, token] with values as in "heads", "packed" K and V
    side by side in [block, head, token, 2 * dim].
    """
    q_heads, kv_heads = heads
    used = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(used) + 3
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(num_blocks, generator=generator).int()
    block_table = torch.full((len(used), max(used, default=0) + 1), -7, dtype=torch.int32)
    shape = (num_blocks, block_size, kv_heads, head_size)
    k = normal(*shape, dtype=dtype, seed=seed + 1)
    v = normal(*shape, dtype=dtype, seed=seed + 2)
    owned = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    start = 0
    for row, (n, blocks) in enumerate(zip(context_lens, used, strict=True)):
        block_table[row, :blocks] = ids[start : start + blocks]
        for i in range(n):
            owned[block_table[row, i // block_size], i % block_size] = True
        start += blocks
    k[~owned] = NAN
    v[~owned] = NAN
    if layout == "heads":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif layout == "turned":
        k = k.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "packed":
        both = torch.cat([k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
        k, v = both.split(head_size, -1)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Paged(
        q=normal(sum(query_lens), q_heads, head_size, dtype=dtype, seed=seed + 3),
        k_cache=k,
        v_cache=v,
        block_table=block_table,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        query_start_loc=starts,
    )


def partials(
    n: int, tokens: int, heads: int, head_size: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """n partials whose lses differ by several units, as a long and a short part do."""
    outs = [normal(tokens, heads, head_size, dtype=dtype, seed=seed + i) for i in range(n)]
    lses = [normal(heads, tokens, seed=seed + 100 + i) * 2 + i for i in range(n)]
    return outs, lses


def assert_fused(got: Tensor, exact: Tensor) -> None:
    """`got` is at most twice as far from `exact` as `exact` rounded once to got's dtype."""
    assert_as_good(got, exact.to(got.dtype), exact)
