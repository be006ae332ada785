"""vLLM's FlashAttention functions in plain torch, strict about how they are called.

Not for speed and not from a GPU: they say what the backend's calls mean, and where FlashAttention 2
does something else, they do that (`write_as_fa2`). A schedule belongs to one call:
`get_scheduler_metadata` writes down for which, and the call it is given to compares.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vllm_relay.ops import reference

# What FlashAttention leaves in outputs of tokens that are in no sequence.
UNWRITTEN = float("nan")
# An A100's; FlashAttention 2 splits keys while its tiles do not fill them.
MULTIPROCESSORS = 108


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    **others: Any,
) -> Any:
    """As vLLM's; writes only tokens of sequences, out and LSE alike."""
    assert set(others) <= {
        "alibi_slopes", "q_descale", "k_descale", "v_descale", "s_aux", "dynamic_causal",
        "mask_mod", "aux_tensors",
    }  # fmt: skip
    paged = block_table is not None
    assert paged == (seqused_k is not None) and paged == (cu_seqlens_k is None)
    if cu_seqlens_k is not None:
        # Dense keys as a cache of blocks of one token.
        assert cu_seqlens_k.shape == cu_seqlens_q.shape and scheduler_metadata is None
        first_keys, seqused_k = cu_seqlens_k[:-1], cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        assert bool((seqused_k >= 0).all())
        max_seqlen_k = max(max_seqlen_k, int(first_keys.max()))
        rows = torch.arange(int(seqused_k.max()), dtype=torch.int32)
        block_table = first_keys[:, None] + rows[None]
        k, v = k[:, None], v[:, None]
    out = torch.full_like(q, UNWRITTEN) if out is None else out
    batch = len(seqused_k)
    if q.dtype == torch.float8_e4m3fn:
        assert fa_version == 3 and k.dtype == v.dtype == q.dtype and out.dtype != q.dtype
        scales = [others[name] for name in ("q_descale", "k_descale", "v_descale")]
        assert {tuple(scale.shape) for scale in scales} == {(batch, k.shape[2])}
        # Per KV head, and per query head of its group.
        scales[0] = scales[0].repeat_interleave(q.shape[1] // k.shape[2], 1)
        q, k, v = (x.double() * s[0, :, None] for x, s in zip((q, k, v), scales, strict=True))
    assert cu_seqlens_q.shape == (batch + 1,) and len(block_table) == batch
    for tensor in (cu_seqlens_q, seqused_k, block_table):
        assert tensor.dtype == torch.int32 and tensor.stride(-1) == 1
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
    assert out.shape == q.shape
    starts, lens = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert max(b - a for a, b in pairwise(starts)) <= max_seqlen_q
    assert max(lens) <= max_seqlen_k
    assert starts[0] >= 0 and starts[-1] <= len(q) and starts == sorted(starts)
    swapped, sinks = False, others.get("s_aux")
    if fa_version == 2:
        assert sinks is None, "FlashAttention 2 has no sinks"
        assert num_splits <= 1 and scheduler_metadata is None
        windowed = window_size is not None and tuple(window_size) != (-1, -1)
        swapped = max_seqlen_q == 1 and q.shape[1] > k.shape[2]
        swapped = swapped and not windowed and others.get("alibi_slopes") is None
    if swapped:
        # It takes every row to have one query, whatever the starts say.
        assert len(q) == batch
        starts = list(range(batch + 1))
        cu_seqlens_q = torch.tensor(starts, dtype=torch.int32)
    if scheduler_metadata is not None:
        schedule = _schedule(
            seqused_k, cu_seqlens_q, causal, num_splits,
            max_seqlen_q, q.shape[1], k.shape[2], q.shape[2], k.shape[1],
            *(window_size or (-1, -1)),
        )  # fmt: skip
        assert torch.equal(scheduler_metadata, schedule), "the schedule is of another call"
    lse = q.new_full((q.shape[1], q.shape[0]), UNWRITTEN, dtype=torch.float32)
    exact, exact_lse = reference.context_attention(
        q,
        k,
        v,
        block_table,
        seqused_k,
        cu_seqlens_q,
        softmax_scale or None,
        causal=causal,
        window=None if window_size is None or window_size[0] < 0 else window_size[0],
        softcap=softcap,
        sinks=sinks,
    )
    owned = slice(starts[0], starts[-1])
    out[owned] = exact[owned].to(out.dtype)
    lse[:, owned] = exact_lse[:, owned]
    if fa_version == 2:
        tiles = -(-max_seqlen_k // (256 if q.shape[2] <= 64 else 128 if q.shape[2] <= 128 else 64))
        heads, queries = q.shape[1], max_seqlen_q
        if swapped:
            heads, queries = k.shape[2], q.shape[1] // k.shape[2]
        splits = fa2_splits(batch * heads * -(-queries // 64), tiles) if swapped else 1
        lse = write_as_fa2(lse, starts, lens, heads, queries, splits)
    return (out, lse) if return_softmax_lse else out


def fa2_splits(tiles: int, key_tiles: int) -> int:
    """Parts of the keys of a decode step in FlashAttention 2, ``num_splits_heuristic``.

    The fewest at which its tiles keep the processors, two tiles each, nearly as busy as they can.
    """
    room = 2 * MULTIPROCESSORS
    if tiles >= 0.8 * room:
        return 1
    counts = range(1, min(128, room, key_tiles) + 1)
    # More parts than the one before, or as many tiles in each: the same work.
    counts = [n for n in counts if n == 1 or -(-key_tiles // n) != -(-key_tiles // (n - 1))]
    busy = [tiles * n / room / -(-tiles * n // room) for n in counts]
    return next(n for n, b in zip(counts, busy, strict=True) if b >= 0.85 * max(busy))


def write_as_fa2(
    lse: Tensor, starts: list[int], lens: list[int], heads: int, queries: int, splits: int
) -> Tensor:
    """LSE [Hq, T] as FlashAttention 2's paged kernel leaves it.

    A sequence without keys exits early and writes +inf as if the buffer were [sequence, head,
    query], where it is [head, token] (``flash_fwd_kernel.h``, compute_attn_1rowblock_splitkv;
    Dao-AILab/flash-attention#2842). Programs run here one after another, heads outside of
    sequences; a GPU runs them at once, so that what remains is by chance. Split keys go through
    buffers that have that order.

    Args:
        lse: [Hq, T], right for the sequences with keys.
        heads, queries: of the kernel: where it swaps them, KV heads and query heads of each.
    """
    swapped = heads < len(lse)
    # Swapped: [Hkv, sequences, G].
    right = lse.view(heads, queries, -1).transpose(1, 2) if swapped else lse
    right, each = right.flatten(), queries if swapped else 1
    begin, counts = torch.tensor(starts[:-1]), torch.tensor(starts).diff()
    head, row = torch.arange(heads)[:, None], torch.arange(len(lens))
    empty = torch.tensor(lens) == 0
    proper = (head * lse.shape[1] + begin) * each  # [heads, sequences], as programs are started
    at = torch.where(empty & (splits == 1), (row * heads + head) * queries, proper)
    wide = (counts * each).expand(heads, -1).flatten()
    inside = torch.arange(int(wide.sum())) - (wide.cumsum(0) - wide).repeat_interleave(wide)
    proper, at = (x.flatten().repeat_interleave(wide) + inside for x in (proper, at))
    assert not at.numel() or int(at.max()) < right.numel(), "FlashAttention 2 writes out of bounds"
    values = torch.where(empty.repeat(heads).repeat_interleave(wide), torch.inf, right[proper])
    left = torch.full_like(right, UNWRITTEN).numpy()
    left[at.numpy()] = values.numpy()  # the last of those that write to one place
    left = torch.from_numpy(left)
    if not swapped:
        return left.view(lse.shape)
    return left.view(heads, -1, queries).transpose(1, 2).reshape(lse.shape)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype,
    cu_seqlens_q: Tensor,
    page_size: int,
    causal: bool,
    window_size: tuple[int, int],
    num_splits: int,
) -> Tensor:
    """Of the size of FlashAttention 3's, and with what the call has to agree with in it."""
    assert len(cache_seqlens) == batch_size
    return _schedule(
        cache_seqlens, cu_seqlens_q, causal, num_splits,
        max_seqlen_q, num_heads_q, num_heads_kv, headdim, page_size, *window_size,
    )  # fmt: skip


def _schedule(lens: Tensor, starts: Tensor, causal: bool, num_splits: int, *sizes: int) -> Tensor:
    room = -(-len(lens) // 4) * 4
    made = torch.zeros(1 + 4 * room, dtype=torch.int32)
    made[0] = 1 + 2 * num_splits + bool(causal)
    made[1 : 1 + len(lens)] = lens
    made[1 + room : 1 + room + len(lens)] = starts[1:] - starts[:-1]
    made[1 + 2 * room] = hash(sizes) % 2**31
    return made


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *others: Any,
) -> None:
    """As vLLM's: a slot below 0 is not written."""
    size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[token]
            value_cache[slot // size, slot % size] = value[token]


FUNCTIONS = (flash_attn_varlen_func, get_scheduler_metadata, reshape_and_cache_flash)


def install(put: Callable[[str, Any], None], version: int = 3) -> None:
    """Give vLLM's flash_attn module these, by ``put(name, value)``.

    The CPU build has the module, but no kernels in it.
    """
    for function in FUNCTIONS:
        put(function.__name__, function)
    put("get_flash_attn_version", lambda *args, **kwargs: version)
    for name in ("sinks", "fp8", "quant_query_input", "kv_cache_dtype"):
        put(f"flash_attn_supports_{name}", lambda *args, **kwargs: True)
