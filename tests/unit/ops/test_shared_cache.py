"""SharedCache against float64 attention over lists of tokens."""

import random

import pytest
import torch

from tests.unit.ops import inputs
from vllm_relay.ops import SharedCache, reference

BATCH, CAPACITY, HEAD_SIZE = 6, 9, 32


class Mirror:
    """What the cache should hold, as one exact [n, Hkv, D] tensor per piece and row."""

    def __init__(self, kv_heads, dtype):
        self.shape, self.dtype = (kv_heads, HEAD_SIZE), dtype
        self.levels = []
        self.seed = 0
        self.forget_own()

    def forget_own(self):
        empty = torch.zeros(0, *self.shape, dtype=self.dtype)
        self.own = [(empty, empty) for _ in range(BATCH)]

    def fill(self, rows, tokens, heads=None):
        """New values [rows, tokens, heads, D]."""
        self.seed += 1
        shape = (rows, tokens, heads or self.shape[0], HEAD_SIZE)
        return inputs.normal(*shape, dtype=self.dtype, seed=self.seed)

    def append_shared(self, k, v, lens):
        self.levels.append([(k[j, :n].clone(), v[j, :n].clone()) for j, n in enumerate(lens)])

    def extend(self, k, v, lens):
        for b, n in enumerate(lens):
            self.own[b] = tuple(
                torch.cat([x, y[b, :n]]) for x, y in zip(self.own[b], (k, v), strict=True)
            )

    def want(self, q, lens, levels, own):
        """Torch's result in q's dtype and the exact one: the first lens[row] queries are a row's
        last, the others 0."""
        want, stock = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(q)
        for row, n in enumerate(lens):
            above = [level[row * len(level) // len(q)] for level in levels]
            for i in range(n):
                seen = max(0, len(own[row][0]) - n + i + 1)
                k, v = (torch.cat([*(x[j] for x in above), own[row][j][:seen]]) for j in (0, 1))
                if len(k):
                    query = q[row, i : i + 1]
                    want[row, i] = reference.attention_lse(query, k, v)[0][0]
                    stock[row, i] = inputs.stock(query, k, v)[0]
        return stock, want

    def check(self, got, q, lens, levels, own):
        # 1.4 times a normal deviate: none of the values reaches 8.
        inputs.assert_as_good(got, *self.want(q, lens, levels, own), partial=8)

    def lengths(self):
        above = [sum(len(x[b * len(x) // BATCH][0]) for x in self.levels) for b in range(BATCH)]
        return [n + len(self.own[b][0]) for b, n in enumerate(above)]


def spoil(lens, *tensors):
    """NaN in all that is padding."""
    for x in tensors:
        for row, n in enumerate(lens):
            x[row, n:] = inputs.NAN


def append(cache, mirror, rows, lens, q_heads, ragged=True):
    """A level in both; its prefill is checked."""
    k, v = (mirror.fill(rows, max(lens) + ragged) for _ in "kv")
    q = mirror.fill(*k.shape[:2], q_heads)
    spoil(lens, q, k, v)
    cache.append_shared(k, v, torch.tensor(lens, dtype=torch.int32) if ragged else None)
    mirror.append_shared(k, v, lens)
    mirror.check(cache.attend_shared(q), q, lens, mirror.levels[:-1], mirror.levels[-1])


def extend(cache, mirror, lens, q_heads, ragged=True):
    """Own tokens in both; their attention is checked."""
    k, v = (mirror.fill(BATCH, max(lens) + ragged) for _ in "kv")
    q = mirror.fill(*k.shape[:2], q_heads)
    spoil(lens, q, k, v)
    given = torch.tensor(lens, dtype=torch.int32) if ragged else None
    cache.extend(k, v, given)
    mirror.extend(k, v, lens)
    mirror.check(cache.attend(q, given), q, lens, mirror.levels, mirror.own)


@pytest.mark.parametrize("heads", inputs.HEADS, ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_scripts(seed, dtype, heads):
    """Random scripts of everything the cache does."""
    q_heads, kv_heads = heads
    draw = random.Random(f"{seed} {heads}")
    cache = SharedCache(BATCH, CAPACITY, kv_heads, HEAD_SIZE, dtype=dtype)
    mirror = Mirror(kv_heads, dtype)
    for _ in range(2):
        for rows in draw.choice([(1, 2), (1, 3, 3), (2, 6), (1,), ()]):
            if mirror.levels and rows % len(mirror.levels[-1]):
                continue
            ragged = draw.random() < 0.7
            lens = [draw.randint(0, 7) for _ in range(rows)] if ragged else [5] * rows
            append(cache, mirror, rows, lens, q_heads, ragged)
        assert cache.levels == len(mirror.levels)
        while True:
            ragged = draw.random() < 0.5
            most = draw.randint(1, 3)
            lens = [draw.randint(0, most) for _ in range(BATCH)] if ragged else [most] * BATCH
            if max(len(k) + n for (k, _), n in zip(mirror.own, lens, strict=True)) > CAPACITY:
                break
            extend(cache, mirror, lens, q_heads, ragged)
            assert cache.lengths().tolist() == mirror.lengths()
        keep = draw.choice([None, *range(len(mirror.levels) + 1)])
        cache.wipe() if keep is None else cache.wipe(keep)
        mirror.levels = mirror.levels[:keep]
        mirror.forget_own()
        assert cache.lengths().tolist() == mirror.lengths()


def small(levels=((1, 4), (3, 2)), own=2):
    cache, mirror = SharedCache(BATCH, CAPACITY, 2, HEAD_SIZE), Mirror(2, torch.float32)
    for rows, most in levels:
        append(cache, mirror, rows, [most] * rows, 4)
    if own:
        extend(cache, mirror, [own] * BATCH, 4)
    return cache, mirror


def test_queries_need_not_be_those_of_the_last_extension():
    cache, mirror = small()
    for n in (1, 5):
        q = mirror.fill(BATCH, n, 4)
        mirror.check(cache.attend(q), q, [n] * BATCH, mirror.levels, mirror.own)
        # Scores are linear in q.
        got = cache.attend(q / 2, scale=2 * HEAD_SIZE**-0.5)
        mirror.check(got, q, [n] * BATCH, mirror.levels, mirror.own)
    q = mirror.fill(3, 3, 4)
    got = cache.attend_shared(q / 2, scale=2 * HEAD_SIZE**-0.5)[:, :2]
    mirror.check(got, q[:, :2], [2] * 3, mirror.levels[:1], mirror.levels[1])


def test_wiped_cache_is_as_new():
    """The next batch below the outer level, beside a cache that never held another."""
    used, mirror = small()
    used.wipe(keep=1)
    fresh, other = small(levels=((1, 4),), own=0)
    assert all(
        torch.equal(*pair) for pair in zip(mirror.levels[0][0], other.levels[0][0], strict=True)
    )
    k, v, q = other.fill(2, 3), other.fill(2, 3), other.fill(2, 3, 4)
    own_k, own_v, own_q = other.fill(BATCH, 4), other.fill(BATCH, 4), other.fill(BATCH, 4, 4)
    results = []
    for cache in (used, fresh):
        assert cache.lengths(2).tolist() == [4, 4]
        cache.append_shared(k, v)
        prefill = cache.attend_shared(q)
        cache.extend(own_k, own_v)
        results.append((prefill, cache.attend(own_q), cache.lengths()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_empty_cache():
    cache = SharedCache(BATCH, CAPACITY, 2, HEAD_SIZE)
    q = inputs.normal(BATCH, 2, 4, HEAD_SIZE)
    assert torch.equal(cache.attend(q), torch.zeros_like(q))
    assert cache.lengths().tolist() == [0] * BATCH
    cache.wipe(keep=0)
    assert cache.attend(q[:, :0]).shape == (BATCH, 0, 4, HEAD_SIZE)
    nothing = q[:, :0, :2]
    cache.extend(nothing, nothing, torch.zeros(BATCH, dtype=torch.int64))
    assert cache.attend(q[:, :0], torch.zeros(BATCH, dtype=torch.int64)).numel() == 0


def test_written_in_place_and_copied():
    cache = SharedCache(BATCH, CAPACITY, 2, HEAD_SIZE)
    buffers = [x.data_ptr() for x in (cache._k, cache._v, cache._lens)]
    k = inputs.normal(BATCH, 2, 2, HEAD_SIZE).requires_grad_()
    lens = torch.full((BATCH,), 2, dtype=torch.int32)
    cache.append_shared(k, k, lens)
    cache.extend(k, k, lens)
    q = inputs.normal(BATCH, 1, 4, HEAD_SIZE)
    before = cache.attend(q)
    assert not before.requires_grad
    # What the caller does with the arguments later does not matter.
    k.data.fill_(inputs.NAN)
    lens.fill_(1)
    assert torch.equal(cache.attend(q), before)
    given = cache.lengths()
    given.zero_()
    assert cache.lengths().tolist() == [4] * BATCH
    cache.wipe()
    cache.extend(before[:, :, :2], before[:, :, :2])
    assert [x.data_ptr() for x in (cache._k, cache._v, cache._lens)] == buffers


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


NEW = torch.zeros(BATCH, 3, 2, HEAD_SIZE)
FULL = torch.zeros(BATCH, CAPACITY - 1, 2, HEAD_SIZE)
QUERY = torch.zeros(BATCH, 3, 4, HEAD_SIZE)
BAD = {
    "one over": ("k", "extend", (FULL, FULL)),
    "one row over": ("k", "extend", (FULL, FULL, ints(0, 0, 8, 0, 0, 0))),
    "k rows": ("k", "extend", (NEW[:3], NEW[:3])),
    "k rank": ("k", "extend", (NEW[0], NEW[0])),
    "k heads": ("k", "extend", (NEW[:, :, :1], NEW[:, :, :1])),
    "k dtype": ("k", "extend", (NEW.half(), NEW)),
    "k type": ("k", "extend", (None, NEW)),
    "v shape": ("v", "extend", (NEW, NEW[:, 1:])),
    "v dtype": ("v", "extend", (NEW, NEW.half())),
    "lens rows": ("lens", "extend", (NEW, NEW, ints(1, 2))),
    "lens dtype": ("lens", "extend", (NEW, NEW, torch.ones(BATCH))),
    "lens large": ("lens", "extend", (NEW, NEW, ints(3, 3, 3, 3, 3, 4))),
    "lens negative": ("lens", "extend", (NEW, NEW, ints(3, 3, 3, 3, 3, -1))),
    "level after own": ("k", "append_shared", (NEW, NEW)),
    "q rows": ("q", "attend", (QUERY[:3],)),
    "q heads": ("q", "attend", (QUERY[:, :, :3],)),
    "q size": ("q", "attend", (QUERY[..., 1:],)),
    "q dtype": ("q", "attend", (QUERY.half(),)),
    "q lens": ("lens", "attend", (QUERY, ints(3, 3, 3, 3, 3, 4))),
    "q lens rows": ("lens", "attend", (QUERY, ints(1))),
    "q tokens": ("q", "attend_shared", (QUERY[:3, :2],)),
    "q level rows": ("q", "attend_shared", (QUERY,)),
    "keep large": ("keep", "wipe", (3,)),
    "keep negative": ("keep", "wipe", (-1,)),
    "rows": ("rows", "lengths", (4,)),
    "rows zero": ("rows", "lengths", (-2,)),
}


@pytest.mark.parametrize(("name", "method", "arguments"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_leave_it_unchanged(name, method, arguments):
    cache, mirror = small()
    q = mirror.fill(BATCH, 3, 4)

    def state():
        levels = [x for level in cache._levels for x in level]
        return [cache._k, cache._v, cache._lens, *levels, cache.attend(q)]

    before = [x.clone() for x in state()]
    with pytest.raises(ValueError, match=rf"^{name}: "):
        getattr(cache, method)(*arguments)
    for a, b in zip(before, state(), strict=True):
        # Padding of levels is NaN.
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    # It still takes what fits, to the last slot.
    extend(cache, mirror, [CAPACITY - 2] * BATCH, 4)


@pytest.mark.parametrize("rows", [0, 2, 4, 12])
def test_bad_level(rows):
    cache, mirror = small(own=0)
    x = torch.zeros(rows, 3, 2, HEAD_SIZE)
    with pytest.raises(ValueError, match=r"^k: "):
        cache.append_shared(x, x)
    assert cache.levels == 2
    append(cache, mirror, 6, [0, 1, 2, 3, 4, 5], 4)


def test_no_level():
    with pytest.raises(ValueError, match=r"^q: "):
        SharedCache(BATCH, CAPACITY, 2, HEAD_SIZE).attend_shared(QUERY)


@pytest.mark.parametrize("name", ["batch", "capacity", "kv_heads", "head_size", "dtype"])
def test_bad_sizes(name):
    sizes = {"batch": 1, "capacity": 1, "kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    SharedCache(**sizes)
    sizes[name] = torch.int32 if name == "dtype" else 0
    with pytest.raises(ValueError, match=rf"^{name}: "):
        SharedCache(**sizes)
