"""relay_attention against float64 attention over each row's concatenated sequence."""

import pytest
import torch

from tests.unit.ops import inputs
from vllm_relay.ops import reference, relay_attention


def problem(batch, queries, own, levels, heads=(6, 2), head_size=64, dtype=torch.float32):
    """Arguments of relay_attention; levels: (rows, tokens) each. Unused slots hold NaN."""
    q_heads, kv_heads = heads

    def pair(rows, tokens, seed):
        shape = (rows, tokens, kv_heads, head_size)
        return (inputs.normal(*shape, dtype=dtype, seed=seed + i) for i in (0, 1))

    def lens(rows, tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, tokens + 1, (rows,), generator=generator, dtype=torch.int32)

    k, v = pair(batch, own, 1)
    shared = [pair(rows, tokens, 10 + 2 * i) for i, (rows, tokens) in enumerate(levels)]
    shared_ks, shared_vs = zip(*shared, strict=True) if shared else ((), ())
    arguments = {
        "q": inputs.normal(batch, queries, q_heads, head_size, dtype=dtype, seed=3),
        "k": k,
        "v": v,
        "shared_ks": list(shared_ks),
        "shared_vs": list(shared_vs),
        "seq_lens": lens(batch, own, 4),
        "shared_seq_lens": [lens(r, t, 5 + i) for i, (r, t) in enumerate(levels)],
    }
    for tensors, used in (
        ([k, v], arguments["seq_lens"]),
        *zip(zip(shared_ks, shared_vs, strict=True), arguments["shared_seq_lens"], strict=True),
    ):
        for x in tensors:
            for row, n in enumerate(used.tolist()):
                x[row, n:] = inputs.NAN
    return arguments


def expected(q, k, v, shared_ks, shared_vs, seq_lens, shared_seq_lens):
    """The exact result and torch's own in q's dtype, by masks over the whole sequence."""
    exact, stock = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(q)
    batch, queries = q.shape[:2]
    for b in range(batch):
        keys, values = [], []
        for shared_k, shared_v, lens in zip(shared_ks, shared_vs, shared_seq_lens, strict=True):
            row = b * shared_k.shape[0] // batch
            keys.append(shared_k[row, : lens[row]])
            values.append(shared_v[row, : lens[row]])
        for i in range(queries):
            seen = max(0, int(seq_lens[b]) - queries + i + 1)
            whole_k = torch.cat([*keys, k[b, :seen]])
            whole_v = torch.cat([*values, v[b, :seen]])
            if whole_k.shape[0] == 0:
                continue
            query = q[b, i : i + 1]
            exact[b, i] = reference.attention_lse(query, whole_k, whole_v)[0][0]
            stock[b, i] = inputs.stock(query, whole_k, whole_v)[0]
    return stock, exact


def assert_relayed(got, arguments):
    values = torch.cat([x.flatten() for x in (arguments["v"], *arguments["shared_vs"])])
    # No partial is larger than the largest value it averages.
    largest = float(values.nan_to_num(nan=0).abs().max())
    inputs.assert_as_good(got, *expected(**arguments), partial=largest)


def check(arguments):
    assert_relayed(relay_attention(**arguments), arguments)


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("heads", inputs.HEADS, ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(
    "levels",
    [[], [(1, 70)], [(1, 40), (2, 33), (6, 9)], [(3, 20), (3, 5)]],
    ids=["none", "one", "tree", "repeated"],
)
def test_against_oracle(levels, heads, dtype):
    check(problem(6, 1, 20, levels, heads, dtype=dtype))


@pytest.mark.parametrize("head_size", [32, 80, 128, 256])
@pytest.mark.parametrize("queries", [1, 3, 9])
def test_queries_are_causal_to_the_end(queries, head_size):
    check(problem(4, queries, 7, [(1, 30), (2, 11)], head_size=head_size))


def test_scale():
    arguments = problem(4, 2, 5, [(1, 30), (2, 11)])
    got = relay_attention(**arguments, scale=0.31)
    # Scores are linear in q: 0.31 is 2.48 times the default of 64 ** -0.5.
    assert_relayed(got, arguments | {"q": arguments["q"] * (0.31 * 8)})


def test_no_own_tokens():
    check(problem(4, 1, 0, [(1, 30), (2, 11)]))


def test_nothing_at_all():
    arguments = problem(3, 2, 0, [])
    assert torch.equal(relay_attention(**arguments), torch.zeros_like(arguments["q"]))
    arguments = problem(4, 1, 5, [(2, 6)])
    arguments["seq_lens"] = torch.zeros(4, dtype=torch.int32)
    arguments["shared_seq_lens"] = [torch.zeros(2, dtype=torch.int32)]
    assert torch.equal(relay_attention(**arguments), torch.zeros_like(arguments["q"]))


def test_no_rows():
    arguments = problem(0, 1, 5, [(1, 6)])
    assert relay_attention(**arguments).shape == (0, 1, 6, 64)


def test_lengths_default_to_all():
    arguments = problem(4, 1, 5, [(2, 6), (4, 3)])
    for x in (arguments["k"], arguments["v"], *arguments["shared_ks"], *arguments["shared_vs"]):
        x.nan_to_num_(nan=0.5)
    del arguments["seq_lens"], arguments["shared_seq_lens"]
    got = relay_attention(**arguments)
    full = {
        "seq_lens": torch.full((4,), 5, dtype=torch.int32),
        "shared_seq_lens": [torch.full((2,), 6, dtype=torch.int32), None],
    }
    assert torch.equal(got, relay_attention(**arguments, **full))
    full["shared_seq_lens"][1] = torch.full((4,), 3, dtype=torch.int32)
    assert_relayed(got, arguments | full)


def replace(key, index, change):
    def spoil(arguments):
        values = arguments[key] = list(arguments[key])
        values[index] = change(values[index])

    return spoil


def change(key, value):
    def spoil(arguments):
        arguments[key] = value(arguments[key])

    return spoil


BAD = {
    "q rank": ("q", change("q", lambda x: x[0])),
    "k batch": ("k", lambda a: a.update(k=a["k"][:2], v=a["v"][:2])),
    "k heads": ("k", change("k", lambda x: x.repeat(1, 1, 2, 1))),
    "v shape": ("v", change("v", lambda x: x[:, 1:])),
    "seq_lens rows": ("seq_lens", change("seq_lens", lambda x: x[:2])),
    "seq_lens dtype": ("seq_lens", change("seq_lens", lambda x: x.float())),
    "seq_lens negative": ("seq_lens", change("seq_lens", lambda x: x - 9)),
    "seq_lens large": ("seq_lens", change("seq_lens", lambda x: x + 9)),
    "shared_vs levels": ("shared_vs", change("shared_vs", lambda x: x[:1])),
    "shared_ks rows": (
        r"shared_ks\[0\]",
        lambda a: (
            replace("shared_ks", 0, lambda x: x.repeat(3, 1, 1, 1))(a),
            replace("shared_vs", 0, lambda x: x.repeat(3, 1, 1, 1))(a),
        ),
    ),
    "shared_ks order": (
        r"shared_ks\[1\]",
        lambda a: a.update({x: a[x][::-1] for x in a if x.startswith("shared")}),
    ),
    "shared_ks KV heads": (
        r"shared_ks\[0\]",
        lambda a: (
            replace("shared_ks", 0, lambda x: x[:, :, :1])(a),
            replace("shared_vs", 0, lambda x: x[:, :, :1])(a),
        ),
    ),
    "shared_ks dtype": (r"shared_ks\[1\]", replace("shared_ks", 1, lambda x: x.half())),
    "shared_vs shape": (r"shared_vs\[1\]", replace("shared_vs", 1, lambda x: x[:, 1:])),
    "shared_seq_lens levels": ("shared_seq_lens", change("shared_seq_lens", lambda x: x[:1])),
    "shared_seq_lens rows": (
        r"shared_seq_lens\[1\]",
        replace("shared_seq_lens", 1, lambda x: x[:1]),
    ),
    "shared_seq_lens negative": (
        r"shared_seq_lens\[0\]",
        replace("shared_seq_lens", 0, lambda x: x - 99),
    ),
    "shared_seq_lens large": (
        r"shared_seq_lens\[0\]",
        replace("shared_seq_lens", 0, lambda x: x + 99),
    ),
    "scale": ("scale", lambda a: a.update(scale=inputs.INF)),
}


@pytest.mark.parametrize(("name", "spoil"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(name, spoil):
    arguments = problem(4, 1, 5, [(1, 6), (2, 7)])
    arguments["shared_seq_lens"] = list(arguments["shared_seq_lens"])
    spoil(arguments)
    with pytest.raises(ValueError, match=rf"^{name}: "):
        relay_attention(**arguments)
