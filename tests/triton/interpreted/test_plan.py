"""The plan made on the device, under the interpreter."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.triton.on_device import OnDevice, let_triton_see
from tests.unit.sharing.forests import check_forest, find_forest
from tests.unit.sharing.oracle import check_rows
from tests.unit.sharing.simulated_pool import BLOCK_SIZE, MAX_COLUMNS, MAX_RUNNING, SimulatedPool
from vllm_relay.ops.planning import group_kernels, launch
from vllm_relay.ops.planning.device_plan import DevicePlan
from vllm_relay.plan import Plan
from vllm_relay.sharing import Forest, Group, Segment

STALE = 1_000_003


@dataclass
class Batch:
    table: np.ndarray  # int32 [R, M]
    seq_lens: np.ndarray
    query_lens: np.ndarray
    block_size: int = 4

    @property
    def depths(self) -> np.ndarray:
        """Full computed blocks."""
        computed = np.where(self.query_lens > 0, self.seq_lens - self.query_lens, 0)
        return np.maximum(computed, 0) // self.block_size


def new_plan(batch: Batch, **kwargs) -> DevicePlan:
    """With room that this batch does not need, and every buffer full of what was there before."""
    rows, columns = batch.table.shape
    sizes = {"max_rows": rows + 3, "max_tokens": int(batch.query_lens.sum()) + 9}
    plan = DevicePlan(
        max_blocks=columns + 2, block_size=batch.block_size, device="cpu", **sizes, **kwargs
    )
    for name in (
        "cu_tokens", "segment_lens", "index", "context_lens", "depth", "leader", "common",
        "consecutive", "dense",
    ):  # fmt: skip
        getattr(plan.buffers, name).fill_(7)
    for name in ("score", "hashes", "segment_table", "context_table"):
        getattr(plan.buffers, name).fill_(STALE)
    return plan


def update(plan: DevicePlan, batch: Batch, padding: int = 2) -> Plan:
    table = torch.full((len(batch.table), batch.table.shape[1] + 1), STALE, dtype=torch.int32)
    table[:, :-1] = torch.from_numpy(batch.table)
    starts = np.concatenate([[0], batch.query_lens.cumsum()]).astype(np.int32)
    return plan.update(
        table[:, :-1],  # rows further apart than they are long
        torch.from_numpy(batch.seq_lens.astype(np.int32)),
        torch.from_numpy(starts),
        num_tokens=int(starts[-1]) + padding,
        max_query_len=int(batch.query_lens.max()),
        max_seq_len=int(batch.seq_lens.max()),
    )


def groups_of(step: Plan, batch: Batch) -> list[list[tuple[list[int], list[int]]]]:
    """Per level the members and blocks of each group; checks what an attention call relies on."""
    owner = np.repeat(np.arange(len(batch.table)), batch.query_lens)
    levels = []
    for part, index in zip(step.levels, step.index.numpy(), strict=step.dense is None):
        starts, lens = part.query_start_loc.numpy(), part.seq_lens.numpy()
        assert len(starts) == len(lens) + 1 == len(part.block_table) + 1
        assert (np.diff(starts) >= 0).all()
        assert not part.causal and part.max_query_len >= starts[-1]
        # The dense group's tokens come first, and are in no sequence of the level.
        dense = step.index[-1] if step.dense is not None and not levels else None
        assert starts[0] == (0 if dense is None else int((dense >= 0).sum()))
        # Every token has a place of its own, all of them the first ones.
        assert sorted(index[index >= 0]) == list(range(starts[0], starts[-1]))
        assert (index[len(owner) :] == -1).all(), "padding is in a group"
        found = []
        for group, (begin, end) in enumerate(pairwise(starts)):
            tokens = np.flatnonzero((index >= begin) & (index < end))
            # Tokens of a row stay together and in order.
            assert (np.diff(index[tokens][np.diff(owner[tokens], prepend=-1) == 0]) > 0).all()
            rows = np.unique(owner[tokens])
            assert len(tokens) == batch.query_lens[rows].sum()
            if group == 0 and dense is not None and starts[0] > 0:
                # Read there, and here not at all.
                assert lens[0] == 0 and not len(tokens)
                tokens = np.flatnonzero(dense >= 0)
                rows = np.unique(owner[tokens])
                assert len(tokens) == batch.query_lens[rows].sum()
                found.append((rows.tolist(), dense_group(step, tokens, batch.block_size)))
                continue
            assert (lens[group] > 0) == (len(rows) > 0)
            if len(rows):
                assert lens[group] % batch.block_size == 0
                blocks = part.block_table[group, : lens[group] // batch.block_size]
                found.append((rows.tolist(), blocks.tolist()))
        levels.append(found)
    return levels


def dense_group(step: Plan, tokens: np.ndarray, block_size: int) -> list[int]:
    """The blocks of the dense group, which has to have these tokens."""
    (gap, first, end), queries = step.dense.key_start_loc.tolist(), step.dense.query_start_loc
    assert gap == 0 and first % block_size == end % block_size == 0 and end > first
    assert queries.tolist() == [0, 0, len(tokens)]
    assert sorted(step.index[-1].numpy()[tokens]) == list(range(len(tokens)))
    return list(range(first // block_size, end // block_size))


def check(plan: DevicePlan, batch: Batch) -> list[list[tuple[list[int], list[int]]]]:
    step = update(plan, batch)
    levels = groups_of(step, batch)
    context = step.context
    assert context.causal
    check_rows(
        levels,
        context.block_table.numpy(),
        context.seq_lens.numpy(),
        batch.table,
        np.maximum(batch.seq_lens, 1),  # a row of padding has a key
        batch.block_size,
        batch.query_lens,
    )
    forest, start = [], {row: 0 for row in range(len(batch.table))}
    around = dict.fromkeys(start, 0)
    for level in levels:
        made = []
        # A forest has groups in the order of those around them; the dense group may stand ahead.
        level = sorted(level, key=lambda group: around[group[0][0]])
        around = {row: index for index, (rows, _) in enumerate(level) for row in rows}
        for rows, blocks in level:
            made.append(Group(Segment(start[rows[0]], len(blocks)), np.array(rows, dtype=np.int32)))
            for row in rows:
                start[row] += len(blocks)
        if made:
            forest.append(tuple(made))
    check_forest(Forest(tuple(forest), len(batch.table), batch.block_size))
    last, _ = plan.newest()
    saved = sum((len(rows) - 1) * len(blocks) for level in levels for rows, blocks in level)
    assert last.tokens_saved == saved * batch.block_size
    assert last.groups == sum(map(len, levels))
    assert last.requests == sum(len(rows) for rows, _ in levels[0])
    shared = sum(len(blocks) for level in levels for _, blocks in level)
    assert last.tokens_shared == shared * batch.block_size
    assert last.tokens_stock == batch.seq_lens.sum()
    return levels


def expected(batch: Batch, min_saved: int = 0) -> list[tuple[list[int], list[int]]]:
    """One level by its definition, in plain loops."""
    depths, table = batch.depths.copy(), batch.table
    for row, depth in enumerate(depths):
        ends = np.flatnonzero(table[row, :depth] <= 0)
        depths[row] = ends[0] if len(ends) else depth
    columns = [((2 + i % 2) << (i // 2)) // 2 for i in range(40)]
    leader, common = {}, {}
    for row, depth in enumerate(depths):
        best = (0, 1)
        for n in columns:
            if n > depth:
                break
            same = [
                other
                for other, theirs in enumerate(depths)
                if theirs >= n and (table[other, :n] == table[row, :n]).all()
            ]
            saved = (len(same) - 1) * n
            if saved * best[1] > best[0] * len(same):
                best, leader[row] = (saved, len(same)), same[0]
        if row in leader:
            end = min(depth, depths[leader[row]])
            differ = np.flatnonzero(table[row, :end] != table[leader[row], :end])
            common[row] = int(differ[0]) if len(differ) else int(end)
    groups = []
    for first in sorted(set(leader.values())):
        rows = [row for row in leader if leader[row] == first]
        reach = {d: sum(common[row] >= d for row in rows) for d in {common[row] for row in rows}}
        depth = max(reach, key=lambda d: ((reach[d] - 1) * d, -d))
        saved = (reach[depth] - 1) * depth
        if saved > 0 and saved * batch.block_size >= min_saved:
            members = [row for row in rows if common[row] >= depth]
            groups.append((members, table[members[0], :depth].tolist()))
    return groups


def random_batch(rng: np.random.Generator, rows: int | None = None) -> Batch:
    """A few trunks that branch, rows cut off anywhere, stale ids behind, null blocks, padding."""
    rows, columns = rows or int(rng.integers(2, 12)), int(rng.integers(1, 24))
    table = rng.integers(1, 4, (rows, columns)).astype(np.int32)  # few ids: much in common
    for row in range(1, rows):
        if rng.random() < 0.8:
            same = int(rng.integers(0, columns + 1))
            table[row, :same] = table[rng.integers(row), :same]
    own = rng.random((rows, columns)) < 0.1
    table[own] = rng.permutation(rows * columns)[: own.sum()] + 10
    query_lens = rng.integers(1, 4, rows)
    seq_lens = np.array([rng.integers(q, columns * 4 + 1) if q <= columns * 4 else q
                         for q in query_lens])  # fmt: skip
    seq_lens, query_lens = np.minimum(seq_lens, columns * 4), np.minimum(query_lens, seq_lens)
    if rng.random() < 0.3:
        table[rng.integers(rows), rng.integers(columns)] = rng.choice([0, -1])
    if rng.random() < 0.3:
        seq_lens[-1] = query_lens[-1] = 0
    return Batch(table, seq_lens, query_lens)


@pytest.mark.parametrize("seed", range(25))
def test_groups_are_what_the_definition_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(4):
        batch = random_batch(rng)
        min_saved = int(rng.choice([0, 8, 24]))
        (found,) = check(new_plan(batch, min_saved_tokens=min_saved), batch)
        assert found == expected(batch, min_saved)


def test_rows_beyond_their_window_share_nothing() -> None:
    rng, left_out = np.random.default_rng(11), 0
    for _ in range(8):
        batch = random_batch(rng)
        window = int(np.median(batch.seq_lens))
        (found,) = check(new_plan(batch, window=window), batch)
        inside = np.where(batch.seq_lens <= window, batch.seq_lens, batch.query_lens)
        assert found == expected(replace(batch, seq_lens=inside))
        left_out += found != expected(batch)
    assert left_out > 2


def test_of_more_groups_than_there_is_room_for_those_that_save_most_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "MAX_GROUPS", 2)
    monkeypatch.setattr(launch, "CHUNKS_OF_ROWS", (8,))  # more rows than a program holds at once
    rng = np.random.default_rng(7)
    dropped = 0
    for _ in range(4):
        batch = random_batch(rng, rows=14)
        groups = expected(batch)
        best = sorted(groups, key=lambda g: (-(len(g[0]) - 1) * len(g[1]), len(g[1])))
        (found,) = check(new_plan(batch), batch)
        assert sorted(found) == sorted(best[:2])
        check(new_plan(batch, max_levels=2), batch)
        dropped += len(groups) > 2
    assert dropped > 1
    # Groups that save the same: the first stay.
    pairs = np.repeat(np.arange(1, 16).reshape(5, 3), 2, axis=0).astype(np.int32)
    batch = Batch(pairs, np.full(10, 12), np.ones(10, dtype=np.int64))
    (found,) = check(new_plan(batch), batch)
    assert [rows for rows, _ in found] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("seed", range(12))
def test_levels_are_nested(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(2):
        batch = random_batch(rng)
        check(new_plan(batch, max_levels=3), batch)


@pytest.mark.parametrize("seed", range(8))
def test_the_dense_group_is_the_one_that_saves_most_of_those_in_a_row(seed: int) -> None:
    rng = np.random.default_rng(200 + seed)
    seen = 0
    for _ in range(4):
        batch = random_batch(rng)
        # Some rows of blocks that follow one another, some shared by chance with others.
        for first, rows in ((50, rng.random(len(batch.table)) < 0.4), (80, batch.table[:, 0] == 1)):
            width = int(rng.integers(1, batch.table.shape[1] + 1))
            if rng.random() < 0.7:
                batch.table[rows, :width] = first + np.arange(width)
        plan = new_plan(batch, dense=True, max_levels=2)
        found = check(plan, batch)[0]
        want = expected(batch)
        assert sorted(found) == sorted(want)
        in_a_row = [g for g in want if np.array_equal(np.diff(g[1]), np.ones(len(g[1]) - 1))]
        step = update(plan, batch)
        for loc in (step.dense.key_start_loc, step.dense.query_start_loc):
            assert bool(loc.any()) == bool(in_a_row)
        if in_a_row:
            seen += 1
            assert found[0] == max(in_a_row, key=lambda g: ((len(g[0]) - 1) * len(g[1]), len(g[0])))
    assert seen


def tenants(rng: np.random.Generator, rows: int) -> Batch:
    """Tenants under one template's first blocks, with documents; as services mix them."""
    count = int(rng.integers(1, 6))
    ids = iter(range(1, 10**6))

    def fresh(low: int, high: int) -> list[int]:
        return [next(ids) for _ in range(rng.integers(low, high))]

    root = fresh(0, 12)
    prompts = [fresh(10, 120) for _ in range(count)]
    documents = [[fresh(0, 40) for _ in range(rng.integers(1, 4))] for _ in range(count)]
    weights = rng.dirichlet(np.full(count, rng.choice([0.3, 1, 5])))
    made = []
    for _ in range(rows):
        tenant = rng.choice(count, p=weights)
        document = documents[tenant][rng.integers(len(documents[tenant]))]
        made.append(root + prompts[tenant] + document + fresh(1, 25))
    width = max(map(len, made))
    table = np.full((rows, width), STALE, dtype=np.int32)
    for row, blocks in enumerate(made):
        table[row, : len(blocks)] = blocks
    seq_lens = np.array([4 * len(blocks) for blocks in made])
    return Batch(table, seq_lens, np.ones(rows, dtype=np.int64))


def test_savings_are_close_to_the_best_choice() -> None:
    rng = np.random.default_rng(5)
    shares = []
    for _ in range(12):
        batch = tenants(rng, 16)
        (found,) = check(new_plan(batch), batch)
        saved = sum((len(rows) - 1) * len(blocks) for rows, blocks in found)
        forest = find_forest(batch.table, (batch.depths * 4).astype(np.int32), 4)
        best = sum((len(g.rows) - 1) * g.segment.blocks for level in forest.levels for g in level)
        assert saved <= best
        shares.append(saved / best)
    assert np.mean(shares) > 0.94
    assert min(shares) > 0.75


def test_long_tables_and_many_rows() -> None:
    # More rows and columns than a program holds at once.
    rows, columns = 2 * 8 + 3, 3 * launch.CHUNK_COLUMNS + 5
    table = np.arange(1, rows * columns + 1).reshape(rows, columns).astype(np.int32)
    for column, members in ((columns - 2, range(0, 8)), (300, range(8, 18))):
        table[members, :column] = table[members[0], :column]
    batch = Batch(table, np.full(rows, columns * 4), np.ones(rows, dtype=np.int64))
    plan = new_plan(batch)
    chunks = launch.CHUNKS_OF_ROWS
    try:
        launch.CHUNKS_OF_ROWS = (8,)
        (found,) = check(plan, batch)
    finally:
        launch.CHUNKS_OF_ROWS = chunks
    assert [(len(rows), len(blocks)) for rows, blocks in found] == [(8, columns - 2), (10, 300)]


def test_a_chance_match_of_hashes_changes_nothing_but_the_choice() -> None:
    batch = random_batch(np.random.default_rng(3))
    plan = new_plan(batch)
    mix = group_kernels._mix
    try:
        # All prefixes of a length have one hash: only the count of common blocks is left.
        group_kernels.hash_prefixes_kernel.fn.__globals__["_mix"] = _constant
        check(plan, batch)
    finally:
        group_kernels.hash_prefixes_kernel.fn.__globals__["_mix"] = mix


@triton.jit
def _constant(block, column):
    return (column * 0).to(tl.int64)


def test_simulated_pool() -> None:
    """Evictions, preemptions and reused ids: blocks shared are those of the very same tokens."""
    pool = SimulatedPool(1)
    plan = DevicePlan(
        max_rows=MAX_RUNNING + 3,
        max_tokens=MAX_RUNNING * MAX_COLUMNS * BLOCK_SIZE,
        max_blocks=MAX_COLUMNS,
        block_size=BLOCK_SIZE,
        device="cpu",
    )
    grouped = 0
    for _ in range(60):
        made = pool.step()
        batch = Batch(made.block_table, made.seq_lens, made.query_lens, BLOCK_SIZE)
        if len(batch.table) < 2 or not batch.query_lens.any():
            continue
        for rows, blocks in check(plan, batch)[0]:
            grouped += 1
            tokens = len(blocks) * BLOCK_SIZE
            texts = {tuple(made.requests[row].tokens[:tokens]) for row in rows}
            assert len(texts) == 1
    assert grouped > 20


def test_totals_grow_and_uncounted_steps_do_not() -> None:
    batch = tenants(np.random.default_rng(0), 6)
    plan = new_plan(batch)
    for steps in (1, 2):
        update(plan, batch)
        last, total = plan.newest()
        assert (total.steps, total.steps_relayed) == (steps, steps)
        assert total.tokens_saved == steps * last.tokens_saved > 0
    starts = torch.arange(7, dtype=torch.int32)
    plan.update(
        torch.from_numpy(batch.table),
        torch.from_numpy(batch.seq_lens.astype(np.int32)),
        starts,
        num_tokens=6,
        max_query_len=1,
        max_seq_len=9,
        count=False,
    )
    assert plan.newest()[1] == total


def test_reports_that_are_not_done_are_left_out_unless_waited_for() -> None:
    class Event:
        def __init__(self, done: bool) -> None:
            self.done = done

        def query(self) -> bool:
            return self.done

        def record(self) -> None:
            self.done = False

        def synchronize(self) -> None:
            self.done = True

    batch = tenants(np.random.default_rng(0), 6)
    plan = new_plan(batch)
    assert plan.newest(wait=False)[1].steps == 0
    update(plan, batch)
    update(plan, batch)
    plan._copied[:2] = Event(True), Event(False)
    assert plan.newest(wait=False)[1].steps == 1
    assert plan.newest()[1].steps == 2
    assert plan._copied[1].done
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match=r"^update: "):
            plan.report(wrong)


def test_steps_of_one_shape_have_one_address() -> None:
    rng = np.random.default_rng(2)
    first = tenants(rng, 6)
    plan = new_plan(first)
    second = Batch(rng.permuted(first.table, axis=0), first.seq_lens, first.query_lens)
    addresses = []
    for batch in (first, second):
        step = update(plan, batch)
        tensors = [step.index, step.context.seq_lens, step.context.block_table]
        for part in step.levels:
            tensors += [part.query_start_loc, part.seq_lens, part.block_table]
        addresses.append([(x.data_ptr(), x.shape, x.stride()) for x in tensors])
    assert addresses[0] == addresses[1]


def test_the_host_reads_nothing(monkeypatch) -> None:
    launches = let_triton_see(monkeypatch)
    batch = tenants(np.random.default_rng(0), 5)
    plan = new_plan(batch, max_levels=2, dense=True)
    for name, value in vars(plan.buffers).items():
        object.__setattr__(plan.buffers, name, value.as_subclass(OnDevice))
    starts = torch.arange(6, dtype=torch.int32).as_subclass(OnDevice)
    table = torch.from_numpy(batch.table).as_subclass(OnDevice)
    with pytest.raises(AssertionError, match="the host reads"):
        table[0, 0].item()
    step = plan.update(
        table,
        torch.from_numpy(batch.seq_lens.astype(np.int32)).as_subclass(OnDevice),
        starts,
        num_tokens=6,
        max_query_len=1,
        max_seq_len=99,
    )
    assert isinstance(step.index, OnDevice)
    # hash_prefixes, match_leaders and score_groups per level, lay_out
    assert len(launches) == 2 + 2 * 2
    assert plan.newest()[0].groups > 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("block_table", {"block_table": torch.zeros(6, 3).int()}),
        ("block_table", {"block_table": torch.zeros(1, 3).int(), "seq_lens": torch.ones(1).int(),
                         "query_start_loc": torch.ones(2).int()}),
        ("block_table", {"block_table": torch.zeros(4, 9).int()}),
        ("block_table", {"block_table": torch.zeros(4, 3)}),
        ("block_table", {"block_table": torch.zeros(3, 4).int().t()}),
        ("block_table", {"block_table": [[1, 2]]}),
        ("seq_lens", {"seq_lens": torch.ones(3).int()}),
        ("seq_lens", {"seq_lens": torch.ones(4).long()}),
        ("query_start_loc", {"query_start_loc": torch.ones(4).int()}),
        ("num_tokens", {"num_tokens": 6}),
        ("num_tokens", {"num_tokens": -1}),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(name: str, change: dict) -> None:
    plan = DevicePlan(max_rows=5, max_tokens=5, max_blocks=4, block_size=4, device="cpu")
    good = {
        "block_table": torch.zeros(4, 3).int(),
        "seq_lens": torch.ones(4).int(),
        "query_start_loc": torch.arange(5).int(),
        "num_tokens": 4,
    }
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        plan.update(**{**good, **change}, max_query_len=1, max_seq_len=9)


@pytest.mark.parametrize(
    "name", ["max_rows", "max_tokens", "max_blocks", "block_size", "max_levels"]
)
def test_bad_sizes_are_named(name: str) -> None:
    sizes = {"max_rows": 5, "max_tokens": 5, "max_blocks": 4, "block_size": 4, "max_levels": 1}
    with pytest.raises(ValueError, match=rf"^{name}: "):
        DevicePlan(**{**sizes, name: 0}, device="cpu")
