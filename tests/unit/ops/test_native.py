"""The CPU kernels: every instruction set against the oracle, bad calls, threads."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.unit.ops import fuzz_native, inputs, test_context
from vllm_relay.ops import context_attention, providers, reference, system_attention
from vllm_relay.ops.attention import native as attention
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.packed import PackedSegment
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.ops.step.native import NativeStep, sequences_of
from vllm_relay.plan import Part
from vllm_relay.sharing import Forest, make_plan

pytestmark = pytest.mark.skipif(
    isinstance(native.library(), str), reason=f"no CPU kernels: {native.library()}"
)
ALL = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "portable")


@pytest.fixture(autouse=True)
def same_settings_afterwards() -> Iterator[None]:
    isa, threads = native.loaded().isa, torch.get_num_threads()
    yield
    native.loaded().use_isa(isa)
    torch.set_num_threads(threads)


def use(isa: str) -> None:
    if isa not in native.loaded().isas:
        pytest.skip(f"this machine has no {isa}")
    native.loaded().use_isa(isa)


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("part", range(4))
def test_random_calls_agree_with_the_oracle(isa: str, part: int) -> None:
    use(isa)
    assert fuzz_native.run(120, 10_000 * part) == []


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 11, 13, 15, 16, 17, 129, 300])
def test_any_number_of_rows(rows: int, isa: str) -> None:
    use(isa)
    q, k, v = (inputs.normal(n, 1, 64, dtype=torch.bfloat16, seed=n) for n in (rows, 777, 777))
    with providers.use("system", "native"):
        out, _ = system_attention(q, k, v)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).double() for x in (q, k, v))
    )
    inputs.assert_as_good(out, inputs.stock(q, k, v), exact.transpose(0, 1))


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 100, 512])
def test_prompts_over_blocks_of_any_size(isa: str, dtype: torch.dtype, block_size: int) -> None:
    """Tiles that many rows read: of one block or of several, the last one partly filled."""
    use(isa)
    for layout in fuzz_native.LAYOUTS:
        step = inputs.paged(
            [703, 77], [90, 40], block_size=block_size, dtype=dtype, layout=layout, seed=block_size
        )
        with providers.use("context", "native"):
            test_context.check(step, context_attention)


@pytest.mark.parametrize("heads", [1, 3])
def test_threads_share_one_long_prefix_and_the_sums_are_reproducible(heads: int) -> None:
    q, k, v = (inputs.normal(n, heads, 128, dtype=torch.bfloat16) for n in (5, 9000, 9000))
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        first, again = (system_attention(q, k, v) for _ in range(2))
        assert all(map(torch.equal, first, again))
        results.append(first)
    for out, lse in results[1:]:
        assert (out.double() - results[0][0].double()).abs().max() < 4e-3
        assert (lse - results[0][1]).abs().max() < 1e-4


def test_a_segment_is_packed_anew_in_its_memory() -> None:
    step = inputs.paged([128], [1], heads=(2, 2), head_size=32, block_size=64, layout="heads")
    layout = native.layout_of(step.k_cache, step.v_cache, paged=True)
    table = step.block_table[0, :2].numpy()
    segment = PackedSegment(layout, 2, 32, step.q.dtype, table)
    first = [x.clone() for x in segment.tensors()]
    segment.pack(layout, table[::-1])
    turned = PackedSegment(layout, 2, 32, step.q.dtype, table[::-1]).tensors()
    assert all(map(torch.equal, segment.tensors(), turned))
    assert not any(map(torch.equal, segment.tensors(), first))
    with pytest.raises(ValueError, match="1 blocks in a segment of 128 tokens"):
        segment.pack(layout, table[:1])


def test_a_block_that_does_not_exist_is_refused_before_it_is_read() -> None:
    step = inputs.paged([40], [1], block_size=32)
    layout = native.layout_of(step.k_cache, step.v_cache, paged=True)
    for bad in (-1, len(step.k_cache), 2**31 - 1):
        table = np.array([[0, bad]], dtype=np.int32)
        part = Part(
            query_start_loc=np.array([0, 1], dtype=np.int32),
            seq_lens=np.array([40], dtype=np.int32),
            block_table=table,
            max_query_len=1,
            max_seq_len=40,
            causal=True,
        )
        sequences = sequences_of(part)
        with pytest.raises(ValueError, match="block id"):
            attention.attend_once(step.q, 2, 1.0, layout, sequences)
        step.block_table[0, 1] = bad
        with pytest.raises(ValueError, match="block_table"):
            context_attention(*step.args())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_buffers_do_not_take_torchs_default_dtype(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for seed in range(20):
            rng = random.Random(seed)
            fuzz_native.check_system(rng, seed)
            fuzz_native.check_context(rng, seed)
            fuzz_native.check_step(rng, seed)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sequences_without_queries_come_first(threads: int) -> None:
    step = inputs.paged([5, 300, 40, 0], [0, 64, 0, 0], heads=(1, 1), block_size=32)
    torch.set_num_threads(threads)
    out, lse = context_attention(*step.args())
    exact, exact_lse = reference.context_attention(*step.args())
    inputs.assert_lse(lse, exact_lse, step.q.dtype)
    assert inputs.error(out, exact) < 1e-5


@pytest.mark.parametrize("isa", ALL)
def test_any_nan_stays_one(isa: str) -> None:
    use(isa)
    q, k, v = (inputs.normal(n, 1, 32) for n in (7, 800, 800))
    q[1, 0, 3] = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)[0]
    out, lse = system_attention(q, k, v)
    assert out[1].isnan().all() and lse[:, 1].isnan().all()
    assert out[[0, 2, 3, 4, 5, 6]].isfinite().all()


def _ungrouped_step(
    lens: list[int],
    queries: list[int] | None = None,
    heads: tuple[int, int] = (4, 2),
    window: int = 0,
) -> tuple[inputs.Paged, NativeStep, torch.Tensor]:
    """A step of one query each, unless told, its plan for the kernels, and room for its output."""
    queries = queries or [1] * len(lens)
    step = inputs.paged(lens, queries, heads=heads, head_size=32, block_size=32)
    plan = make_plan(
        Forest((), len(lens), 32),
        step.block_table.numpy(),
        np.array(lens, dtype=np.int32),
        step.query_start_loc.numpy(),
    )
    shape = AttentionShape(
        heads=heads[0],
        kv_heads=heads[1],
        head_size=32,
        dtype=step.q.dtype,
        scale=32**-0.5,
        window=window,
    )
    return step, NativeStep(plan, [], shape), torch.full_like(step.q, torch.nan)


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("window", [0, 31, 32, 33, 63, 64, 65])
def test_rows_see_no_key_beyond_their_edges(isa: str, heads: tuple[int, int], window: int) -> None:
    """Rows computed together whose edges lie at, before and after those of KV blocks."""
    use(isa)
    step, attention, out = _ungrouped_step([97, 128, 159], [40, 33, 7], heads, window)
    attention.run(step.q, native.layout_of(step.k_cache, step.v_cache, paged=True), [], out)
    seen = {"causal": True, **({"window": window - 1} if window else {})}
    rows = [step.row(row) for row in range(3)]
    exact = torch.cat([reference.attention_lse(*row, **seen)[0] for row in rows])
    inputs.assert_as_good(out, torch.cat([inputs.stock(*row, **seen) for row in rows]), exact)


def test_a_sink_that_is_not_a_number_makes_none() -> None:
    step, attention, out = _ungrouped_step([1, 40])
    layout = native.layout_of(step.k_cache, step.v_cache, paged=True)
    attention.run(step.q, layout, [], out, sinks=torch.tensor([0.0, torch.nan, 0.0, 0.0]))
    assert out[:, 1].isnan().all() and out[:, [0, 2, 3]].isfinite().all()


def test_a_sink_of_minus_infinity_is_none() -> None:
    step, attention, out = _ungrouped_step([0, 1, 40])
    layout = native.layout_of(step.k_cache, step.v_cache, paged=True)
    attention.run(step.q, layout, [], out, sinks=torch.full((4,), -torch.inf))
    expected = torch.empty_like(out)
    attention.run(step.q, layout, [], expected)
    assert torch.equal(out, expected) and (out[0] == 0).all()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]]
)
@pytest.mark.parametrize("name", ["slopes", "sinks"])
def test_slopes_and_sinks_are_float32_of_every_head(name: str, wrong: torch.Tensor) -> None:
    step, attention, out = _ungrouped_step([40])
    layout = native.layout_of(step.k_cache, step.v_cache, paged=True)
    with pytest.raises(ValueError, match=rf"^{name}: expected float32 \[4\]"):
        attention.run(step.q, layout, [], out, **{name: wrong})
    assert out.isnan().all()


def test_calls_that_the_kernels_cannot_take_use_pytorch() -> None:
    q, k, v = (torch.randn(n, 2, 24) for n in (3, 10, 10))
    assert providers.choose("system", q, k, v).name == "torch"
    with providers.use("system", "native"), pytest.raises(ValueError, match="multiple of 16"):
        system_attention(q, k, v)
    assert (
        providers.choose("system", *(torch.randn(n, 2, 32) for n in (3, 10, 10))).name == "native"
    )


def test_a_library_of_other_sources_is_refused_and_an_instruction_set_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="avx512_vnni"):
        native.loaded().use_isa("avx512_vnni")
    script = "from vllm_relay.ops.native import library as native; print(native.library())"

    def told(isa: str) -> str:
        environment = os.environ | {"VLLM_RELAY_CPU_ISA": isa}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert "VLLM_RELAY_CPU_ISA=none" in told("none")
    assert "VLLM_RELAY_CPU_ISA: no instruction set 'mmx', only" in told("mmx")

    monkeypatch.setattr(native, "TABLE", native.TABLE + 1)
    with pytest.raises(OSError, match="install vllm-relay again"):
        native.Library(str(native.loaded()._functions._name))
