"""Which provider runs, and that FlashAttention and xformers are called as they document.

Stand-ins with the real signatures compute the result by the oracle, so a wrong argument shows in
the numbers. Their own kernels are tested in test_system.py and test_context.py, on a GPU.
"""

import importlib.machinery
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.ops import inputs, test_context, test_system
from tests.unit.ops.test_context import MIXED
from tests.unit.ops.test_system import qkv
from vllm_relay.ops import providers, reference, system_attention
from vllm_relay.ops.attention import flash_attn, xformers
from vllm_relay.ops.native import library as native

# Of CPU tensors: our own kernels, or what there is without a compiler.
OURS = "torch" if isinstance(native.library(), str) else "native"


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch):
    monkeypatch.setattr(providers, "_registered", dict(providers._registered))
    yield
    forget()


def forget():
    """Packages and providers found so far."""
    providers.module.cache_clear()


def install(monkeypatch, name, **contents):
    """Put a module of that name in place of an installed or a missing one."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    forget()


def on_cuda(dtype=torch.bfloat16, head_size=128, block_size=None, first=None):
    """q, k, v without data that say they are on a GPU; k and v paged if block_size is given.

    first: dimension of k that changes places with its heads in memory.
    """
    shape = (5, 2, head_size) if block_size is None else (5, block_size, 2, head_size)
    k = torch.empty(shape, dtype=dtype, device="meta")
    if first is not None:
        k = k.transpose(-2, first).contiguous().transpose(-2, first)
    with FakeTensorMode():
        q = torch.empty(3, 4, head_size, dtype=dtype, device="cuda")
        return q, *(torch.empty_strided(shape, k.stride(), dtype=dtype, device="cuda"),) * 2


def chosen(op, **tensors):
    return providers.choose(op, *on_cuda(**tensors)).name


@pytest.fixture
def a_modern_gpu(monkeypatch):
    """A GPU of capability 9.0 with triton, and neither flash_attn nor xformers."""
    pytest.importorskip("triton", reason="needs triton")
    on_cuda()  # imports what it needs before modules are taken away
    monkeypatch.setattr(providers, "_capability", lambda _: (9, 0))
    for name in ("flash_attn", "xformers", "xformers.ops.fmha"):
        monkeypatch.setitem(sys.modules, name, None)
    forget()


def test_cpu_tensors_take_the_cpu_kernels():
    assert providers.choose("system", *qkv(1, 1)).name == OURS
    assert providers.choose("context", *inputs.paged([1], [1]).args()[:3]).name == OURS


@pytest.mark.parametrize("op", providers.OPS)
def test_cuda_tensors_take_the_first_that_is_usable(op, a_modern_gpu, monkeypatch):
    block_size = 256 if op == "context" else None
    assert chosen(op, block_size=block_size) == "triton"
    install(monkeypatch, "flash_attn")
    assert chosen(op, block_size=block_size) == "flash-attn"
    providers.register("other", providers._registered["triton"].implementation, ["cuda"])
    assert chosen(op, block_size=block_size) == "other"


def test_what_flash_attention_cannot_take_goes_to_triton(a_modern_gpu, monkeypatch):
    install(monkeypatch, "flash_attn")
    assert chosen("system", dtype=torch.float32) == "triton"
    assert chosen("system", head_size=100) == "triton"
    assert chosen("system", first=-1) == "triton"
    assert chosen("context", block_size=16) == "triton"
    assert chosen("context", block_size=256, first=-1) == "triton"


def test_old_gpus_and_wide_heads_take_plain_torch(a_modern_gpu, monkeypatch):
    assert chosen("system", head_size=512) == "torch"
    monkeypatch.setattr(providers, "_capability", lambda _: (7, 5))
    assert chosen("context", block_size=16) == "torch"


def test_xformers_is_asked_before_plain_torch_and_only_for_systems(a_modern_gpu, monkeypatch):
    install(monkeypatch, "xformers.ops.fmha", memory_efficient_attention_partial=None)
    monkeypatch.delitem(providers._registered, "triton")
    assert chosen("system") == "xformers"
    assert chosen("context", block_size=64) == "torch"
    with pytest.raises(ValueError, match="context provider 'xformers' is unknown; there are fl"):
        providers.use("context", "xformers")


@pytest.mark.parametrize(
    ("name", "tensors", "reason"),
    [
        ("native", {}, "needs CPU tensors"),
        ("flash-attn", {"dtype": torch.float32}, "needs float16 or bfloat16, not torch.float32"),
        ("flash-attn", {"head_size": 100}, "a multiple of 8 up to 256, not 100"),
        ("flash-attn", {"first": -1}, "channels are adjacent"),
        ("flash-attn", {"block_size": 16}, "a multiple of 256 tokens, not 16"),
        ("flash-attn", {}, "flash_attn cannot be imported"),
        ("xformers", {}, "xformers.ops.fmha cannot be imported"),
        ("triton", {"head_size": 512}, "a head size up to 256, not 512"),
    ],
)
def test_a_forced_provider_that_cannot_says_why(name, tensors, reason, a_modern_gpu):
    op = "context" if "block_size" in tensors else "system"
    message = rf"^{op} provider '{name}' is not usable here: .*{reason}"
    with providers.use(op, name), pytest.raises(ValueError, match=message):
        chosen(op, **tensors)


def test_an_installation_that_is_broken_is_not_used(a_modern_gpu, monkeypatch):
    stock = importlib.import_module

    def broken(name):
        if name in (flash_attn.__name__, "vllm_relay.ops.attention.torch"):
            return stock(name)
        raise OSError("undefined symbol")

    forget()
    monkeypatch.setattr(providers.importlib, "import_module", broken)
    assert chosen("system") == "torch"
    with providers.use("system", "flash-attn"), pytest.raises(ValueError, match="undefined symbol"):
        chosen("system")


def test_xformers_without_partial_attention_is_not_used(a_modern_gpu, monkeypatch):
    install(monkeypatch, "xformers.ops.fmha")
    with providers.use("system", "xformers"), pytest.raises(ValueError, match="this xformers has"):
        chosen("system")


def test_unknown_names_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"^system provider 'cuda' is unknown; there are f"):
        providers.use("system", "cuda")
    with pytest.raises(ValueError, match=r"^op: expected one of system, context, got 'fusion'"):
        providers.use("fusion", "torch")
    monkeypatch.setenv("VLLM_RELAY_SYSTEM_PROVIDER", "tritn")
    with pytest.raises(ValueError, match=r"^system provider 'tritn' is unknown"):
        system_attention(*qkv(1, 1))


def test_use_is_stronger_than_the_environment_and_ends(monkeypatch):
    monkeypatch.setenv("VLLM_RELAY_SYSTEM_PROVIDER", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with providers.use("system", "torch"):
        with providers.use("system", OURS):
            assert providers.choose("system", *qkv(1, 1)).name == OURS
        assert providers.choose("system", *qkv(1, 1)).name == "torch"
        assert providers.choose("context", *inputs.paged([1], [1]).args()[:3]).name == OURS
    with pytest.raises(ValueError, match="'triton' is not usable here: needs CUDA tensors"):
        system_attention(*qkv(1, 1))


def test_use_without_a_block_lasts():
    providers.use("system", "torch")
    assert providers.choose("system", *qkv(1, 1)).name == "torch"
    providers.use("system", None)
    assert providers.choose("system", *qkv(1, 1)).name == OURS


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
def test_every_case_runs_with_plain_torch(dtype):
    with providers.use("context", "torch"), providers.use("system", "torch"):
        test_context.check(inputs.paged([33, 0, 50, 7], [2, 1, 5, 1], dtype=dtype))
        test_system.check(*qkv(3, 70, dtype=dtype))


@contextmanager
def forced(implementation):
    """Run both ops by it on CPU tensors, which it says it cannot take."""
    functions = ("system_attention", "context_attention")
    taken = {name: getattr(implementation, name, None) for name in functions}
    providers.register("it", SimpleNamespace(**taken, unusable=lambda *_: None))
    with providers.use("system", "it"), providers.use("context", "it"):
        yield


def by_oracle(q, rows, scale, causal, dead):
    """FlashAttention's result for rows of (slice of q, k, v); `dead` is its LSE of nothing."""
    out = torch.full_like(q, inputs.NAN)
    lse = torch.full((q.shape[1], q.shape[0]), inputs.NAN)
    for part, k, v in rows:
        one, one_lse = reference.attention_lse(q[part], k, v, scale, causal=causal)
        out[part], lse[:, part] = one.to(q.dtype), one_lse.float()
    return out, lse.masked_fill(lse.isneginf(), dead)


def rows_of(q_ends, lens, k, v, block_table):
    """The rows of a varlen call, with FlashAttention's own demands."""
    assert q_ends.dtype == lens.dtype == torch.int32
    assert q_ends.is_contiguous() and lens.is_contiguous()
    ends = q_ends.tolist()
    for row, (start, end, n) in enumerate(zip(ends, ends[1:], lens.tolist(), strict=False)):
        if block_table is None:
            yield slice(start, end), k[:n], v[:n]
            continue
        assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
        ids = block_table[row, : -(-n // k.shape[1])].long()
        yield slice(start, end), k[ids].flatten(0, 1)[:n], v[ids].flatten(0, 1)[:n]


def check_maxima(q, q_ends, lens, max_seqlen_q, max_seqlen_k):
    queries = q_ends.diff()
    assert max_seqlen_q >= int(queries.max())
    assert max_seqlen_k >= int(lens.max())
    assert max_seqlen_q > 1 or q.shape[0] == lens.shape[0]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    return_attn_probs=False,
    block_table=None,
):
    """flash_attn.flash_attn_varlen_func 2.8."""
    assert return_attn_probs
    assert (cu_seqlens_k.diff() >= cu_seqlens_q.diff()).all(), "LSE of queries that see nothing"
    check_maxima(q, cu_seqlens_q, cu_seqlens_k.diff(), max_seqlen_q, max_seqlen_k)
    rows = rows_of(cu_seqlens_q, cu_seqlens_k.diff(), k, v, block_table)
    return *by_oracle(q, rows, softmax_scale, causal, inputs.INF), None


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    return_softmax_lse=False,
):
    """flash_attn.flash_attn_with_kvcache 2.8."""
    assert return_softmax_lse and k is None and v is None
    batch, queries = q.shape[:2]
    flat = q.flatten(0, 1)
    if block_table is None:
        assert batch == 1
        rows = [(slice(0, queries), k_cache[0], v_cache[0])]
    else:
        ends = torch.arange(batch + 1, dtype=torch.int32) * queries
        rows = rows_of(ends, cache_seqlens, k_cache, v_cache, block_table)
    out, lse = by_oracle(flat, rows, softmax_scale, causal, inputs.INF)
    return out.view(q.shape), lse.view(-1, batch, queries).transpose(0, 1).contiguous()


def test_the_flash_attn_package_is_called_as_it_documents(monkeypatch):
    functions = {f.__name__: f for f in (flash_attn_varlen_func, flash_attn_with_kvcache)}
    install(monkeypatch, "flash_attn", **functions)
    with forced(flash_attn):
        test_system.check(*qkv(7, 133))
        for context_lens, query_lens in [*MIXED[:3], ([5, 0, 40], [3, 3, 3]), ([20, 3], [1, 0])]:
            test_context.check(inputs.paged(context_lens, query_lens))


def test_an_unknown_lse_layout_is_refused(monkeypatch):
    def old(q, k, v, softmax_scale, causal, return_softmax_lse):
        return q, torch.zeros(1, 1, q.shape[2], 128)

    install(monkeypatch, "flash_attn", flash_attn_with_kvcache=old)
    with forced(flash_attn), pytest.raises(ValueError, match=r"shape \(1, 6, 128\)"):
        system_attention(*qkv(3, 4))


def memory_efficient_attention_partial(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    """xformers.ops.fmha.memory_efficient_attention_partial on [1, M, G, H, K]."""
    assert query.dim() == key.dim() == 5 and query.shape[0] == key.shape[0] == 1
    assert query.shape[2:] == key.shape[2:] == value.shape[2:]
    assert query.shape[3] == 1 or key.stride(3) == 0
    q = query[0].flatten(1, 2)
    k, v = (x[0].flatten(1, 2) for x in (key, value))
    assert attn_bias is None
    out, lse = by_oracle(q, [(slice(0, q.shape[0]), k, v)], scale, False, -inputs.INF)
    # Some operators pad the queries of the LSE.
    lse = torch.nn.functional.pad(lse, (0, 5), value=inputs.NAN)
    return out.view(query.shape), lse.view(1, *query.shape[2:4], -1)


def test_xformers_is_called_as_it_documents(monkeypatch):
    partial = memory_efficient_attention_partial
    install(monkeypatch, "xformers.ops.fmha", memory_efficient_attention_partial=partial)
    with forced(xformers):
        for heads in inputs.HEADS:
            test_system.check(*qkv(7, 133, heads))
