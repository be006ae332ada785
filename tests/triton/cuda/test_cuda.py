"""The CUDA backend on CPU tensors: plans and forward passes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from tests import reference_flash
from tests.triton.cuda.cuda_bench import (
    BLOCKS,
    MAX_ROWS,
    Bench,
    Step,
    make_config,
    random_step,
    stock_metadata,
)
from tests.triton.cuda.cuda_cases import ALONE, CLOSE, SHARED, check, install, owned, relayed
from tests.triton.on_device import OnDevice, let_triton_see, plain, seeing
from vllm_relay import metrics
from vllm_relay.backend import cuda, cuda_history, cuda_support
from vllm_relay.ops.fusion import triton as fusion


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize(
    "settings", [{}, {"max_levels": 2}, {"max_levels": 2, "dense": True}], ids=str
)
def test_relay_is_stock_attention(folder, monkeypatch, version, settings) -> None:
    install(monkeypatch, version)
    bench = Bench(make_config(folder, **settings))
    assert bench.builder.aot_schedule == (version == 3)
    rng = np.random.default_rng(version)
    shared = 0
    for _ in range(4):
        step = random_step(rng)
        metadata = bench.build(step, capture=True)
        assert relayed(metadata)
        shared += bench.builder.device_plan.newest()[0].groups
        for layer in (0, 1):
            check(bench, step, metadata, layer)
    assert shared > 3


@pytest.mark.parametrize(("dense", "version"), [(False, 2), (True, 3)])
def test_a_captured_step_serves_all_that_follow(folder, monkeypatch, dense, version) -> None:
    """As a full graph: host values and addresses of capture, contents of each step."""
    install(monkeypatch, version)
    bench = Bench(make_config(folder, dense=dense))
    rng = np.random.default_rng(1)
    size = 8
    dummy = Step([([1], 1, 1)] * size, size)
    captured = bench.build(dummy, capture=True)
    groups = []
    for _ in range(8):
        step = random_step(rng, padded=size)
        bench.build(step)
        assert bench.builder.planned
        check(bench, step, captured)
        groups.append(bench.builder.device_plan.newest()[0].groups)
    alone = Step(ALONE.rows, size)
    bench.build(alone)
    check(bench, alone, captured)
    assert max(groups) > 1


def test_rows_with_several_queries(folder) -> None:
    config = make_config(folder)
    config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=2)
    bench = Bench(config)
    rng = np.random.default_rng(2)
    captured = bench.build(Step([([1], 3, 3)] * 4, 4), capture=True)
    for _ in range(4):
        step = random_step(rng, queries=3, padded=4)
        bench.build(step)
        check(bench, step, captured)


def test_mixed_steps_in_full_graphs_of_all(folder) -> None:
    bench = Bench(make_config(folder, graphs="FULL"))
    dummy = Step([([1], 1, 1)] * 3 + [([2], 5, 5)], 4, tokens=9)
    captured = bench.build(dummy, capture=True)
    step = Step(
        [([5, 6, 70], 40, 2), ([5, 6, 71], 45, 1), ([72], 9, 5), ([5, 6, 73], 33, 1)], 4, tokens=9
    )
    bench.build(step)
    assert bench.builder.device_plan.newest()[0].requests == 3
    check(bench, step, captured)
    # Larger than any graph: vLLM's own.
    longer = Step([([5, 6, 70], 40, MAX_ROWS), ([5, 6, 71], 45, 1)])
    assert not relayed(bench.build(longer))


@pytest.mark.parametrize("graphs", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_prefill_in_the_batch_leaves_the_decodes_relayed(folder, monkeypatch, graphs) -> None:
    monkeypatch.setattr(cuda, "MIXED_TOKENS", 40)
    bench = Bench(make_config(folder, graphs=graphs))
    # Two prompts, one of them behind a prefix that it shares, and chunks of both.
    prompts = [([5, 6, 7, 80, 81], 70, 20), ([82, 83], 30, 11)]
    mixed = Step([*SHARED.rows, *prompts])
    assert not relayed(bench.build(mixed)), "nothing was heard of yet"
    for _ in range(cuda_history.HEARD_AFTER + 1):
        bench.build(SHARED)
    for _ in range(2):
        metadata = bench.build(mixed)
        assert relayed(metadata)
        check(bench, mixed, metadata)
        assert bench.builder.device_plan.newest()[0].requests == 6
    larger = Step([*SHARED.rows, ([82, 83, 84], 40, 36)])
    assert not relayed(bench.build(larger)), "more queries than there is memory for"
    monkeypatch.setattr(cuda, "MIXED_TOKENS", 7)  # less than a decode step may have
    assert not relayed(bench.build(Step([*SHARED.rows, ([82], 5, 3)])))
    monkeypatch.setattr(cuda, "MIXED_TOKENS", 40)
    for _ in range(cuda_history.HEARD_AFTER + 1):
        bench.build(ALONE)
    assert not relayed(bench.build(mixed)), "nothing was shared of late"


def test_a_server_with_a_prefill_in_every_step_learns_what_it_shares(folder) -> None:
    bench = Bench(make_config(folder))
    mixed, relays = Step([*SHARED.rows, ([82, 83], 30, 11)]), []
    for _ in range(cuda_history.PROBE_STEPS + cuda_history.HEARD_AFTER + 2):
        relays.append(relayed(metadata := bench.build(mixed)))
        check(bench, mixed, metadata)
    assert not relays[0] and all(relays[-2:])


def test_a_prefill_pays_for_launches_without_a_graph(folder) -> None:
    bench = Bench(make_config(folder))
    mixed = Step([*SHARED.rows, ([82, 83], 30, 11)])
    for outside, planned in ((10**6, False), (0, True)):
        bench.builder._min_saved_outside = outside
        for _ in range(cuda_history.HEARD_AFTER + 1):
            bench.build(SHARED)
        assert relayed(bench.build(mixed)) == planned
    assert cuda_support.predicted_minimum(bench.builder, True) < cuda_support.predicted_minimum(
        bench.builder, False
    )


def test_outside_of_graphs_a_step_is_relayed_once_sharing_was_heard_of(folder) -> None:
    bench = Bench(make_config(folder, graphs="PIECEWISE"))
    for _ in range(cuda_history.HEARD_AFTER):
        assert not relayed(bench.build(SHARED))
    for _ in range(2):
        metadata = bench.build(SHARED)
        assert relayed(metadata)
        check(bench, SHARED, metadata)
    for _ in range(cuda_history.HEARD_AFTER):
        bench.build(ALONE)
    planned = []
    for _ in range(2 * cuda_history.PROBE_STEPS):
        metadata = bench.build(ALONE)
        assert not relayed(metadata)
        planned.append(bench.builder.planned)
        check(bench, ALONE, metadata)
    assert sum(planned) == 2, "steps that share nothing are planned now and then"
    waited = 0
    while not relayed(metadata := bench.build(SHARED)):
        waited += 1
    assert waited <= cuda_history.PROBE_STEPS + cuda_history.HEARD_AFTER
    check(bench, SHARED, metadata)


def test_batches_that_could_not_save_enough_have_no_relay_in_their_graph(folder) -> None:
    # Of 4 rows, 3 are saved the longest sequence of (240 + 1) tokens, 16 blocks.
    bench = Bench(make_config(folder, min_saved_tokens=3 * 16 * 16 + 1))
    for rows, covered in ((4, False), (5, True)):
        metadata = bench.build(Step([([1], 1, 1)] * rows, rows), capture=True)
        assert relayed(metadata) == covered


def test_steps_left_to_vllm(bench) -> None:
    def plain(metadata) -> bool:
        return type(metadata) is FlashAttentionMetadata

    assert plain(bench.build(Step(SHARED.rows[:1])))
    assert plain(bench.build(Step([(b, n, 2) for b, n, _ in SHARED.rows])))
    common = SHARED.common(bench.buffers)
    assert plain(bench.builder.build(0, common, fast_build=True))
    assert plain(bench.builder.build_for_drafting(common, 0))
    assert plain(bench.builder.build(0, common.replace(causal=False)))
    assert isinstance(bench.builder.build(0, common), cuda.RelayMetadata)


def test_a_group_whose_blocks_follow_one_another_is_dense(folder, monkeypatch) -> None:
    bench = Bench(make_config(folder, dense=True))
    metadata = bench.build(SHARED, capture=True)
    plan = metadata.plan
    # Blocks 5, 6, 7 do; 9, 8 do not. The first sequence stands for what lies before block 5.
    assert plan.dense.key_start_loc.tolist() == [0, 5 * 16, 8 * 16]
    assert plan.dense.query_start_loc.tolist() == [0, 0, 3]
    assert plan.levels[0].seq_lens.tolist()[:3] == [0, 2 * 16, 0]
    assert (plan.index[1] >= 0).tolist() == [True, False, True, False, False, True]
    check(bench, SHARED, metadata)
    plan.dense.key_start_loc[1] += 1
    with pytest.raises(AssertionError):
        check(bench, SHARED, metadata)
    alone = Step(ALONE.rows, len(SHARED.rows))
    bench.build(alone)
    assert not plan.dense.key_start_loc.any() and not plan.dense.query_start_loc.any()
    check(bench, alone, metadata)


def test_a_cache_of_scattered_blocks_has_no_dense_view(folder) -> None:
    bench = Bench(make_config(folder, dense=True))
    # Heads outside of tokens, as some connectors ask for.
    bench.set_cache(bench.cache.contiguous())
    metadata = bench.build(SHARED, capture=True)
    assert metadata.plan.dense is None
    check(bench, SHARED, metadata)


def test_hooks_that_would_keep_an_old_plan_are_off(bench) -> None:
    assert not bench.builder.supports_update_block_table
    assert not bench.builder.supports_draft_decode_metadata_update
    assert not bench.builder.use_cascade_attention(512, None)
    stock = cuda.FlashAttentionMetadataBuilder
    assert bench.builder._cudagraph_support is stock._cudagraph_support


def test_builders_that_wrap_ours_are_asked_for_capture_and_drafts_too(folder, monkeypatch) -> None:
    """vLLM's cross attention and others override ``build`` alone."""
    asked = []

    class Wrapped(cuda.RelayMetadataBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            asked.append(fast_build)
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    monkeypatch.setattr(cuda.RelayBackend, "get_builder_cls", staticmethod(lambda: Wrapped))
    bench = Bench(make_config(folder))
    assert relayed(bench.build(SHARED, capture=True))
    bench.builder.build_for_drafting(SHARED.common(bench.buffers), 0)
    assert asked == [False, True]


def test_ranks_decide_alike_whenever_their_plans_arrive(folder, monkeypatch) -> None:
    """By the plan of each step two back, and by no later one even where it has arrived."""
    heard, planned = [], []
    bench = Bench(make_config(folder, graphs="PIECEWISE"))
    bench.build(SHARED)
    report = bench.builder.device_plan.report
    monkeypatch.setattr(
        bench.builder.device_plan,
        "report",
        lambda n: heard.append((bench.builder.history.step, n)) or report(n),
    )
    # It writes a line to the log now and then, for which it looks at the newest.
    monkeypatch.setattr(metrics, "log_sharing", lambda last: None)
    planned.append(1)
    for step in range(2, 8):
        bench.build(SHARED)
        planned += [step] * bench.builder.planned
    assert [now - planned[n] for now, n in heard] == [cuda_history.HEARD_AFTER] * len(heard)
    assert len(heard) >= 3


def test_metadata_of_the_whole_step_is_vllms_own(bench) -> None:
    """For layers of the group that relay leaves to vLLM."""
    metadata = bench.build(SHARED, capture=True)
    common = SHARED.common(bench.buffers)
    want = stock_metadata(bench.builder, common)
    for name, value in vars(want).items():
        got = getattr(metadata, name)
        same = torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
        assert same, name
    bench.layers[1].impl.refusal = "a test"
    check(bench, SHARED, metadata, layer=1)


def _without_schedule(step) -> None:
    step.levels[0] = replace(step.levels[0], scheduler_metadata=None)


# Errors in what the kernels are given; the tests above must see each of them.
def _break_cu_seqlens(step) -> None:
    starts = step.levels[0].query_start_loc
    starts[1] -= 1
    _without_schedule(step)


def _break_the_order(step) -> None:
    used = step.index[0] >= 0
    step.index[0][used] = step.index[0][used].roll(1)


def _break_the_shift(step) -> None:
    table = step.context.block_table
    table[:, 1:] = table[:, :-1].clone()


def _break_the_lengths(step) -> None:
    step.levels[0].seq_lens[0] -= 1
    _without_schedule(step)


@pytest.mark.parametrize(
    "plant", [_break_cu_seqlens, _break_the_order, _break_the_shift, _break_the_lengths]
)
def test_a_planted_error_in_the_plan_is_seen(bench, plant) -> None:
    metadata = bench.build(SHARED, capture=True)
    check(bench, SHARED, metadata)
    plant(metadata.plan)
    with pytest.raises(AssertionError):
        check(bench, SHARED, metadata)


def test_a_wrong_way_back_to_the_order_of_the_batch_is_seen(bench, monkeypatch) -> None:
    metadata = bench.build(SHARED, capture=True)
    merge_into = fusion.merge_into

    def turned(out, lse, outs, lses, index):
        used = index >= 0
        index = index.masked_scatter(used, index[used].flip(0))
        return merge_into(out, lse, outs, lses, index)

    monkeypatch.setattr(fusion, "merge_into", turned)
    with pytest.raises(AssertionError):
        check(bench, SHARED, metadata)


def test_a_partial_of_nothing_that_is_read_is_seen(bench, monkeypatch) -> None:
    # A level whose only sequence of keys is empty: its partial is -inf, and it holds NaN.
    metadata = bench.build(SHARED, capture=True)
    plan = metadata.plan
    part = plan.levels[0]
    empty = replace(part, seq_lens=torch.zeros_like(part.seq_lens), scheduler_metadata=None)
    metadata.plan = replace(
        plan, levels=[*plan.levels, empty], index=plan.index.expand(2, -1).contiguous()
    )

    def forward(dead: float) -> torch.Tensor:
        def attend(**kwargs):
            out, lse = reference_flash.flash_attn_varlen_func(**kwargs)
            empty = torch.isinf(lse)
            out[empty.any(0)] = torch.nan
            return out, lse.masked_fill(empty, dead)

        with monkeypatch.context() as patch:
            patch.setattr(flash_attn, "flash_attn_varlen_func", attend)
            return bench.forward(metadata, bench.queries(owned(SHARED)))

    want = bench.stock(SHARED, bench.queries(owned(SHARED)))
    for dead in (-torch.inf, torch.inf):
        torch.testing.assert_close(forward(dead), want, **CLOSE)
    assert forward(0.0).isnan().any()


def test_counters(bench) -> None:
    before = metrics.counters()
    bench.build(SHARED, capture=True)
    bench.build(SHARED)
    bench.build(ALONE)
    after = metrics.counters()
    grown = {name: after[name] - before[name] for name in after}
    assert {name: count for name, count in grown.items() if count} == {
        "steps": 2,
        "steps_relayed": 1,
        "groups": 2,
        "requests": 5,
        "tokens_shared": (3 + 2) * 16,
        # two layers, K and V of two heads of 32 in float32
        "kv_bytes_not_read": (2 * 3 + 2) * 16 * 2 * 2 * 2 * 32 * 4,
    }


def test_the_host_reads_nothing(bench, monkeypatch) -> None:
    """Plan, schedules and forward of a step; only kernels see values."""

    for function in reference_flash.FUNCTIONS:
        monkeypatch.setattr(flash_attn, function.__name__, seeing(function))
    let_triton_see(monkeypatch)
    bench.build(SHARED)  # makes the plan's buffers
    buffers = bench.builder.device_plan.buffers
    for name, value in vars(buffers).items():
        object.__setattr__(buffers, name, value.as_subclass(OnDevice))
    common = SHARED.common(bench.buffers)
    names = ("block_table_tensor", "seq_lens", "query_start_loc")
    common = common.replace(**{name: getattr(common, name).as_subclass(OnDevice) for name in names})
    bench.builder.build(0, common)
    for metadata in (
        bench.builder.build(0, common),
        bench.builder.build_for_cudagraph_capture(common),
    ):
        assert isinstance(metadata.plan.context.seq_lens, OnDevice)
        q = bench.queries(owned(SHARED))
        got = bench.forward(metadata, q.as_subclass(OnDevice))
        torch.testing.assert_close(plain(got), bench.stock(SHARED, q), **CLOSE)


def test_stale_ids_of_the_step_before_are_never_read(bench) -> None:
    """A step of long rows, then one of short rows in the same buffers."""
    long = Step([(list(range(1, 14)), 200, 1), (list(range(1, 14)), 190, 1)], 4)
    captured = bench.build(long, capture=True)
    check(bench, long, captured)
    short = Step([([20, 21], 18, 1), ([20, 22], 30, 1), ([23], 2, 1)], 4)
    bench.build(short)
    bench.cache[1:14] = torch.nan
    check(bench, short, captured)
    assert int(bench.builder.device_plan.buffers.context_table.max()) < BLOCKS
