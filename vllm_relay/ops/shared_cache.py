"""The KV of one layer for `relay_attention`: levels of shared pieces and each row's own tokens.

The loop of Hydragen (arXiv 2402.05099, section 3): prefill what is shared once per piece, decode
all rows, forget their tokens, decode the next batch under the same pieces.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_relay.ops import checks
from vllm_relay.ops.relay import relay_attention


class _Level(NamedTuple):
    k: Tensor
    v: Tensor
    lens: Tensor


class SharedCache:
    """One layer's KV of a batch: what a row sees is its piece of every level, then its own tokens.

    Own tokens are written in place into buffers allocated here; a level is allocated when it is
    appended. Every method raises a ValueError that names the argument that does not fit, and then
    leaves the cache as it was.

    Args:
        batch: B, rows that decode together.
        capacity: most own tokens of a row.
        kv_heads, head_size: Hkv, D.
        dtype: of K, V and queries: bf16, fp16 or fp32.
        device: of the same.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"batch": batch, "capacity": capacity, "kv_heads": kv_heads, "head_size": head_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        checks.floats("dtype", dtype)
        self._k = torch.zeros(batch, capacity, kv_heads, head_size, dtype=dtype, device=device)
        self._v = torch.zeros_like(self._k)
        # The same lengths on both sides: the check for capacity must not wait for the device.
        self._lens = torch.zeros(batch, dtype=torch.int32, device=self._k.device)
        self._own = [0] * batch
        self._levels: list[_Level] = []

    @property
    def levels(self) -> int:
        """How many shared levels it holds."""
        return len(self._levels)

    def lengths(self, rows: int | None = None) -> Tensor:
        """[rows] int32, tokens that each row sees: the position of its next one.

        rows: of a level to be appended; the batch, with its own tokens, where None.
        """
        if rows is None:
            total = self._lens.clone()
        else:
            self._check_rows("rows", rows)
            total = self._lens.new_zeros(rows)
        for level in self._levels:
            total += level.lens.repeat_interleave(len(total) // len(level.lens))
        return total

    @torch.no_grad()
    def append_shared(self, k: Tensor, v: Tensor, lens: Tensor | None = None) -> None:
        """Add a level below those there are: piece j serves rows j * B / B_i ... of the batch.

        No row may have own tokens: they were computed without the level.

        Args:
            k, v: [B_i, S_i, Hkv, D], copied; B_i divides B and is a multiple of the last level's.
            lens: [B_i] int32, tokens in use; S_i where None. The rest may hold anything.
        """
        used = self._checked_lens(k, v, lens)
        self._check_rows("k", len(k))
        if any(self._own):
            raise ValueError("k: rows already have tokens of their own; wipe() them first")
        self._levels.append(_Level(k.clone(), v.clone(), used))

    @torch.no_grad()
    def extend(self, k: Tensor, v: Tensor, lens: Tensor | None = None) -> None:
        """Add tokens to the rows' own, up to the capacity.

        Args:
            k, v: [B, n, Hkv, D].
            lens: [B] int32, how many of the n each row takes; all where None.
        """
        used = self._checked_lens(k, v, lens)
        batch, capacity = self._k.shape[:2]
        if len(k) != batch:
            raise ValueError(f"k: {len(k)} rows, but the cache has {batch}")
        new = [k.shape[1]] * batch if lens is None else used.tolist()
        own = [a + b for a, b in zip(self._own, new, strict=True)]
        if max(own) > capacity:
            row = own.index(max(own))
            raise ValueError(f"k: row {row} would hold {own[row]} of at most {capacity} tokens")
        token = torch.arange(k.shape[1], device=used.device)
        rows, tokens = (token < used[:, None]).nonzero(as_tuple=True)
        slots = self._lens[rows] + tokens
        self._k[rows, slots] = k[rows, tokens]
        self._v[rows, slots] = v[rows, tokens]
        self._lens += used
        self._own = own

    def wipe(self, keep: int | None = None) -> None:
        """Forget all own tokens and all shared levels but the first `keep` (None: all)."""
        keep = self.levels if keep is None else keep
        if not 0 <= keep <= self.levels:
            raise ValueError(f"keep: expected 0..{self.levels} levels, got {keep}")
        del self._levels[keep:]
        self._lens.zero_()
        self._own = [0] * len(self._own)

    def attend(
        self, q: Tensor, lens: Tensor | None = None, *, scale: float | None = None
    ) -> Tensor:
        """Attention of the rows' last tokens, already extended, to all that they see.

        Args:
            q: [B, N, Hq, D], of each row's last N tokens (or N queries aligned to its end).
            lens: [B] int32 as given to `extend`: row b's are its first lens[b] queries.
            scale: multiplies the scores; D ** -0.5 where None.

        Returns:
            [B, N, Hq, D] in q's dtype, as `relay_attention`; 0 for queries beyond lens.
        """
        k, v = (x[:, : max(self._own)] for x in (self._k, self._v))
        return _attend(q, lens, _Level(k, v, self._lens), self._levels, scale)

    def attend_shared(self, q: Tensor, *, scale: float | None = None) -> Tensor:
        """Attention within the level appended last, causal, and to those above: its prefill.

        Args:
            q: [B_i, S_i, Hq, D], of the tokens that were appended.
            scale: multiplies the scores; D ** -0.5 where None.

        Returns:
            [B_i, S_i, Hq, D] in q's dtype; 0 for padding.
        """
        checks.rank("q", q, 4, "[B_i, S_i, Hq, D]")
        if not self._levels:
            raise ValueError("q: no shared level to attend to")
        *coarser, last = self._levels
        if q.shape[1] != last.k.shape[1]:
            raise ValueError(f"q: {q.shape[1]} tokens per row, but k has {last.k.shape[1]}")
        return _attend(q, last.lens, last, coarser, scale)

    def _checked_lens(self, k: Tensor, v: Tensor, lens: Tensor | None) -> Tensor:
        """[rows] int32 tokens in use, a new tensor, once k, v and lens fit."""
        layout = "[rows, n, Hkv, D]"
        checks.rank("k", k, 4, layout)
        for name, x in (("k", k), ("v", v)):
            checks.shape(name, x, (*k.shape[:2], *self._k.shape[2:]), layout)
            checks.like(name, x, "the cache", self._k)
        if lens is None:
            return self._lens.new_full((k.shape[0],), k.shape[1])
        checks.lengths("lens", lens, len(k), "[rows]", self._k.device, k.shape[1])
        return lens.to(torch.int32, copy=True)

    def _check_rows(self, name: str, rows: int) -> None:
        coarser = len(self._levels[-1].k) if self._levels else 1
        checks.level_rows(name, rows, len(self._k), coarser)


def _attend(
    q: Tensor, lens: Tensor | None, own: _Level, above: Sequence[_Level], scale: float | None
) -> Tensor:
    """Attention of q to the levels above and, aligned to their end, to the rows' own tokens."""
    checks.query(q, 4, "[B, N, Hq, D]")
    checks.like("q", q, "the cache", own.k)
    rows, n, heads, head_size = q.shape
    batch, _, kv_heads, size = own.k.shape
    if rows != batch or heads % kv_heads or head_size != size:
        fits = f"{batch} rows, {kv_heads} KV heads of size {size}"
        raise ValueError(f"q: shape {tuple(q.shape)} does not fit {fits}")
    row = torch.arange(rows, device=q.device)[:, None]
    token = torch.arange(n, device=q.device)
    if lens is not None:
        checks.lengths("lens", lens, rows, "[B]", q.device, n)
        # Queries are aligned to the end of a row's tokens: its padding has to come first.
        q = q[row, (token + lens[:, None]) % max(n, 1)]
    ks, vs, all_lens = ([level[i] for level in above] for i in range(3))
    out = relay_attention(q, own.k, own.v, ks, vs, own.lens, all_lens, scale=scale)
    if lens is None:
        return out
    out = out[row, (token - lens[:, None]) % max(n, 1)]
    return out.masked_fill_((token >= lens[:, None])[:, :, None, None], 0)
