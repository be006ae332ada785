"""Rows of padding in full CUDA graphs, on FlashAttention 2 and 3 as `tests.reference_flash` has
them."""

from typing import Any

import numpy as np
import pytest
import torch

from tests import reference_flash
from vllm_relay.ops import reference

# vLLM's default sizes of graphs.
GRAPHS = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)])
BATCHES = 5_000
SMALL, LARGE = 2_048, 131_072  # of max_model_len: one tile of keys and many


def lse_of(q: torch.Tensor) -> torch.Tensor:
    return q[..., 0].T


@pytest.fixture
def known_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact attention whose LSE is in the query: only what is written where is asked here."""

    def exact(q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return q, lse_of(q)

    monkeypatch.setattr(reference, "context_attention", exact)


def spoiled(rng: np.random.Generator, version: int, padded_keys: int) -> bool:
    """True if one random batch of a graph has an LSE that is not its row's."""
    rows = int(np.exp(rng.uniform(0, np.log(512))))
    size = int(GRAPHS[rows <= GRAPHS].min())
    if rng.random() < 0.3:  # sparse sizes, as users set them
        size = int(rng.choice(GRAPHS[rows <= GRAPHS]))
    kv_heads, group = int(rng.integers(1, 17)), int(rng.choice([1, 2, 4, 8]))
    q = torch.from_numpy(rng.normal(size=(size, kv_heads * group, 1)).astype(np.float32))
    lens = torch.from_numpy(rng.integers(1, SMALL, size=size).astype(np.int32))
    lens[rows:] = padded_keys
    starts = torch.arange(size + 1, dtype=torch.int32).clamp(max=rows)
    cache = torch.empty(1, 16, kv_heads, 1)
    _, lse = reference_flash.flash_attn_varlen_func(
        q,
        cache,
        cache,
        max_seqlen_q=1,
        cu_seqlens_q=starts,
        max_seqlen_k=int(rng.choice([SMALL, LARGE])),
        seqused_k=lens,
        block_table=torch.zeros(size, 1, dtype=torch.int32),
        causal=True,
        return_softmax_lse=True,
        fa_version=version,
    )
    return not torch.equal(lse[:, :rows], lse_of(q)[:, :rows])


@pytest.mark.parametrize("version", [2, 3])
def test_rows_of_padding_with_a_key_leave_the_lse_of_others_alone(
    known_lse: None, version: int
) -> None:
    rng = np.random.default_rng(version)
    assert not any(spoiled(rng, version, padded_keys=1) for _ in range(BATCHES))


def test_without_a_key_flash_attention_2_spoils_it(known_lse: None) -> None:
    rng = np.random.default_rng(0)
    assert sum(spoiled(rng, 2, padded_keys=0) for _ in range(500)) > 50
    assert not any(spoiled(rng, 3, padded_keys=0) for _ in range(500))
