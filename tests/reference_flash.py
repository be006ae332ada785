"""vLLM's FlashAttention functions in plain torch, strict about how they are called.

Not for speed and not from a GPU: they say what the backend's calls mean. A schedule belongs to one
call: `get_scheduler_metadata` writes down for which, and the call it is given to compares.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vllm_relay.ops import reference

# What FlashAttention leaves in outputs of tokens that are in no sequence.
UNWRITTEN = float("nan")


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
    assert cu_seqlens_q.shape == (batch + 1,) and len(block_table) == batch
    for tensor in (cu_seqlens_q, seqused_k, block_table):
        assert tensor.dtype == torch.int32 and tensor.stride(-1) == 1
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
    assert out.shape == q.shape
    starts, lens = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert max(b - a for a, b in pairwise(starts)) <= max_seqlen_q
    assert max(lens) <= max_seqlen_k
    assert starts[0] == 0 and starts[-1] <= len(q) and starts == sorted(starts)
    if fa_version == 2:
        assert num_splits <= 1 and scheduler_metadata is None
    if scheduler_metadata is not None:
        schedule = _schedule(
            seqused_k, cu_seqlens_q, causal, num_splits,
            max_seqlen_q, q.shape[1], k.shape[2], q.shape[2], k.shape[1],
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
    )
    out[: starts[-1]] = exact[: starts[-1]].to(out.dtype)
    lse[:, : starts[-1]] = exact_lse[:, : starts[-1]]
    if fa_version == 2:
        for (begin, end), length in zip(pairwise(starts), lens, strict=True):
            if length == 0:
                lse[:, begin:end] = torch.inf
    return (out, lse) if return_softmax_lse else out


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
        max_seqlen_q, num_heads_q, num_heads_kv, headdim, page_size,
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
    put("flash_attn_supports_sinks", lambda: True)
