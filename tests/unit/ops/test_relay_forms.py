"""relay_attention in every form that Hydragen's `hydragen_attention` and `_nopad` take.

Padded levels, exact ones (Hydragen: one packed tensor and cumulative lengths, here its split), both
in one call, and own tokens that all queries see: against each other and against float64.
"""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.ops import inputs
from tests.unit.ops.test_relay import expected
from vllm_relay.ops import reference, relay_attention

# Rows per level, coarsest first; the batch is a multiple of the last.
TREES = [(1,), (3,), (4,), (1, 1), (1, 4), (2, 4), (3, 3), (1, 2, 4), (1, 3, 6), (2, 2, 2)]
SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
}


@st.composite
def calls(draw):
    """Arguments of a padded call with random lengths; all that is padding holds NaN."""
    tree = draw(st.sampled_from(TREES))
    batch = tree[-1] * draw(st.integers(1, 2))
    q_heads, kv_heads = draw(st.sampled_from(inputs.HEADS))
    head_size = draw(st.sampled_from([32, 64, 80]))
    dtype = draw(st.sampled_from(inputs.DTYPES))
    seed = draw(st.integers(0, 99))

    def padded(rows, most):
        # One slot more than the longest: Hydragen's caches are larger than what they hold.
        lens = draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))
        shape = (rows, max(lens) + 1, kv_heads, head_size)
        k, v = (inputs.normal(*shape, dtype=dtype, seed=seed + i) for i in (rows, rows + 50))
        for row, n in enumerate(lens):
            k[row, n:] = v[row, n:] = inputs.NAN
        return k, v, torch.tensor(lens, dtype=torch.int32)

    queries = draw(st.integers(1, 8))
    k, v, seq_lens = padded(batch, 12)
    shared_ks, shared_vs, shared_seq_lens = zip(*(padded(n, 40) for n in tree), strict=True)
    return {
        "q": inputs.normal(batch, queries, q_heads, head_size, dtype=dtype, seed=seed),
        "k": k,
        "v": v,
        "shared_ks": shared_ks,
        "shared_vs": shared_vs,
        "seq_lens": seq_lens,
        "shared_seq_lens": shared_seq_lens,
    }


def exact(arguments, levels):
    """The same call with these levels as Hydragen packs them, split at their lengths."""
    ks, vs, all_lens = (list(arguments[f"shared_{x}"]) for x in ("ks", "vs", "seq_lens"))
    for i in levels:
        lens = all_lens[i].tolist()
        packed_k, packed_v = (
            torch.cat([x[row, :n] for row, n in enumerate(lens)]) for x in (ks[i], vs[i])
        )
        ks[i], vs[i], all_lens[i] = packed_k.split(lens), list(packed_v.split(lens)), None
    return arguments | {"shared_ks": ks, "shared_vs": vs, "shared_seq_lens": all_lens}


def largest(arguments):
    """No partial is larger than the largest value that it averages."""
    values = (arguments["v"], *arguments["shared_vs"])
    return max(float(x.nan_to_num(nan=0).abs().max()) for x in values)


def problem(lens, shared_lens, queries=1, dtype=torch.float32):
    """One call with these own lengths and these lengths per level, padded with NaN."""

    def pair(lens, seed):
        shape = (len(lens), max(lens) + 1, 2, 32)
        k, v = (inputs.normal(*shape, dtype=dtype, seed=seed + i) for i in (0, 1))
        for row, n in enumerate(lens):
            k[row, n:] = v[row, n:] = inputs.NAN
        return k, v, torch.tensor(lens, dtype=torch.int32)

    k, v, seq_lens = pair(lens, 1)
    levels = [pair(x, 10 * i) for i, x in enumerate(shared_lens, 1)]
    shared_ks, shared_vs, shared_seq_lens = zip(*levels, strict=True)
    return {
        "q": inputs.normal(len(lens), queries, 4, 32, dtype=dtype),
        "k": k,
        "v": v,
        "shared_ks": shared_ks,
        "shared_vs": shared_vs,
        "seq_lens": seq_lens,
        "shared_seq_lens": shared_seq_lens,
    }


@settings(max_examples=120, **SETTINGS)
@given(calls())
@example(problem([3, 0], [[0], [5, 0]]))
@example(problem([0, 0], [[0, 0]], queries=3))
# The lengths of Hydragen's own test.
@example(problem([129, 2, 3, 4, 5, 6, 7, 128], [[7, 7], [9, 10, 11, 4]], dtype=torch.float16))
def test_padded_and_exact_levels(arguments):
    want = expected(**arguments)
    padded = relay_attention(**arguments)
    inputs.assert_as_good(padded, *want, partial=largest(arguments))
    levels = range(len(arguments["shared_ks"]))
    for form in (levels, levels[:1], levels[1:]):
        got = relay_attention(**exact(arguments, form))
        inputs.assert_as_good(got, *want, partial=largest(arguments))
        torch.testing.assert_close(got, padded)


@settings(max_examples=20, **SETTINGS)
@given(calls())
def test_no_padding(arguments):
    """Hydragen's `_nopad`: lengths of own tokens only, or none at all."""
    shared = {x: [y.nan_to_num(nan=0.5) for y in arguments[x]] for x in ("shared_ks", "shared_vs")}
    own = {x: arguments[x].nan_to_num(nan=0.5) for x in ("k", "v")}
    full = [torch.full((len(x),), x.shape[1]) for x in shared["shared_ks"]]
    for seq_lens in (arguments["seq_lens"], None):
        call = arguments | shared | own | {"seq_lens": seq_lens, "shared_seq_lens": full}
        got = relay_attention(**call | {"shared_seq_lens": None})
        if seq_lens is None:
            call["seq_lens"] = torch.full((len(own["k"]),), own["k"].shape[1])
        inputs.assert_as_good(got, *expected(**call), partial=largest(call))


@settings(max_examples=30, **SETTINGS)
@given(calls())
def test_own_tokens_seen_by_all_queries(arguments):
    """With seq_lens and several queries Hydragen is not causal: own tokens as one more level."""
    call = arguments | {"k": arguments["k"][:, :0], "v": arguments["v"][:, :0], "seq_lens": None}
    for name, x in (("ks", "k"), ("vs", "v"), ("seq_lens", "seq_lens")):
        call[f"shared_{name}"] = [*arguments[f"shared_{name}"], arguments[x]]
    got = relay_attention(**call)
    q = call["q"]
    want, stock = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(q)
    for b in range(len(q)):
        rows = [b * len(lens) // len(q) for lens in call["shared_seq_lens"]]
        k, v = (
            torch.cat(
                [
                    x[row, : lens[row]]
                    for x, row, lens in zip(call[key], rows, call["shared_seq_lens"], strict=True)
                ]
            )
            for key in ("shared_ks", "shared_vs")
        )
        if len(k):
            want[b] = reference.attention_lse(q[b], k, v)[0]
            stock[b] = inputs.stock(q[b], k, v)
    inputs.assert_as_good(got, stock, want, partial=largest(arguments))


def with_piece(name, piece):
    def spoil(call):
        call[name][1] = [call[name][1][0], piece(call[name][1][1])]

    return spoil


BAD = {
    "piece rank": (r"shared_ks\[1\]\[1\]", with_piece("shared_ks", lambda x: x[0])),
    "piece dtype": (r"shared_ks\[1\]\[1\]", with_piece("shared_ks", lambda x: x.half())),
    "piece length": (r"shared_vs\[1\]\[1\]", with_piece("shared_vs", lambda x: x[1:])),
    "piece heads": (
        r"shared_ks\[1\]\[1\]",
        lambda call: (
            with_piece("shared_ks", lambda x: x[:, :1])(call),
            with_piece("shared_vs", lambda x: x[:, :1])(call),
        ),
    ),
    "no tensor": (r"shared_ks\[1\]\[1\]", with_piece("shared_ks", lambda x: None)),
    "count": (r"shared_vs\[1\]", lambda call: call["shared_vs"].__setitem__(1, [])),
    "not split": (
        r"shared_vs\[1\]",
        lambda call: call["shared_vs"].__setitem__(1, torch.cat(call["shared_vs"][1])),
    ),
    "packed": (
        r"shared_ks\[1\]",
        lambda call: call["shared_ks"].__setitem__(1, torch.cat(call["shared_ks"][1])),
    ),
    "rows": (
        r"shared_ks\[1\]",
        lambda call: [call[x].__setitem__(1, call[x][1] * 2) for x in ("shared_ks", "shared_vs")],
    ),
    "none": (
        r"shared_ks\[1\]",
        lambda call: [call[x].__setitem__(1, []) for x in ("shared_ks", "shared_vs")],
    ),
    "lengths": (
        r"shared_seq_lens\[1\]",
        lambda call: call["shared_seq_lens"].__setitem__(1, torch.tensor([3, 6])),
    ),
}


@pytest.mark.parametrize(("name", "spoil"), BAD.values(), ids=BAD.keys())
def test_bad_pieces(name, spoil):
    call = exact(problem([1, 2], [[5], [3, 6]]), [1])
    relay_attention(**call)
    spoil(call)
    with pytest.raises(ValueError, match=rf"^{name}: "):
        relay_attention(**call)
