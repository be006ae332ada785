"""`replay` against a recount of every step, on published trees, and what a closed loop is."""

import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.unit.sharing.traces import Row, conversations, row, tree, write
from vllm_relay.explain.replay import Replay, replay
from vllm_relay.explain.trace import Request, Trace, read_trace
from vllm_relay.sharing import (
    Costs,
    KernelCosts,
    StepShape,
    build_trie,
    choose,
    predict,
    predict_stock,
    reads,
)

BLOCK = 8
SECONDS = Costs(
    stock=KernelCosts(call=9.0, token=0.5, first=1.0, read=0.2, pair=0.1),
    context=KernelCosts(call=11.0, token=0.6, first=1.0, read=0.3, pair=0.1),
    system=KernelCosts(call=20.0, token=0.7, first=1.0, pair=0.1),
    fusion=0.4,
    step=30.0,
    level=5.0,
)
ALL = 10**9


def log(tmp_path: Path, rows: list[Row], block_tokens: int = BLOCK) -> Trace:
    return read_trace(write(tmp_path / "log.jsonl", rows), block_tokens)


def run(
    trace: Trace, concurrency: int, max_levels: int = ALL, costs: Costs | None = None
) -> Replay:
    return replay(
        trace, concurrency, costs=costs or reads(), seconds=SECONDS, max_levels=max_levels
    )


def recount(
    rows: list[Row], concurrency: int, max_levels: int, costs: Costs
) -> tuple[Counter[str], float, float]:
    """Every step anew, from the rows of the file: KV tokens by kind, and seconds.

    A block is the tuple of its and all earlier ids.
    """
    paths = [
        [tuple(r["hash_ids"][: i + 1]) for i in range(r["input_length"] // BLOCK)] for r in rows
    ]
    decoding = [i for i, r in enumerate(rows) if r["output_length"]]
    waiting = sorted(decoding, key=lambda i: rows[i]["timestamp"])
    of_trace = Counter(path for i in decoding for path in paths[i])
    ids = {path: i for i, path in enumerate(sorted(of_trace), 1)}
    batch: list[list[int]] = []  # index of a request, tokens that it has generated
    tokens: Counter[str] = Counter()
    stock_seconds = relay_seconds = 0.0
    while waiting or batch:
        while waiting and len(batch) < concurrency:
            batch.append([waiting.pop(0), 0])
        tokens["steps"] += 1
        lens = np.array([rows[i]["input_length"] + made for i, made in batch], dtype=np.int32)
        of_batch = Counter(path for i, _ in batch for path in paths[i])
        table = np.zeros((len(batch), 1 + max(len(paths[i]) for i, _ in batch)), dtype=np.int32)
        for line, (i, _) in zip(table, batch, strict=True):
            line[: len(paths[i])] = [ids[path] for path in paths[i]]
        computed = np.array([len(paths[i]) * BLOCK for i, _ in batch], dtype=np.int32)
        trie = build_trie(table, computed, BLOCK)
        shape = StepShape(trie, BLOCK, lens, np.ones_like(lens))
        # The replay chooses for the middle of a batch's steps; all of them save as many tokens.
        forest = choose(shape, costs, max_levels).forest
        relay = int(lens.sum())
        for level in forest.levels:
            for group in level:
                segments = {
                    tuple(table[r, group.segment.start : group.segment.end]) for r in group.rows
                }
                assert len(segments) == 1
                relay -= (len(group.rows) - 1) * group.segment.blocks * BLOCK
        stock = int(lens.sum())
        repeated = sum(count - 1 for count in of_batch.values()) * BLOCK
        tokens["stock"] += stock
        tokens["relay"] += relay
        tokens["once"] += stock - repeated
        tokens["saved"] += stock - relay
        tokens["repeated"] += repeated - (stock - relay)
        for i, made in batch:
            tokens["generated"] += made
            tokens["own"] += rows[i]["input_length"]
            for path in paths[i]:
                if of_trace[path] > 1:
                    tokens["own"] -= BLOCK
                    if of_batch[path] == 1:
                        tokens["other_times"] += BLOCK
        tokens["first_reads"] += sum(BLOCK for count in of_batch.values() if count > 1)
        stock_seconds += predict_stock(shape, SECONDS)
        relay_seconds += predict(forest, shape, SECONDS)
        batch = [[i, made + 1] for i, made in batch if made + 1 < rows[i]["output_length"]]
    return tokens, stock_seconds, relay_seconds


@pytest.mark.parametrize("seed", range(24))
def test_as_every_step_counted_anew(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = conversations(rng, rng.randint(1, 25), BLOCK)
    concurrency, levels = rng.choice([1, 2, 3, 6, 40]), rng.choice([1, 2, ALL])
    found = run(log(tmp_path, rows), concurrency, levels)
    expected, stock_seconds, relay_seconds = recount(rows, concurrency, levels, reads())
    assert found.requests == len(rows)
    assert {
        "steps": found.steps,
        "stock": found.kv_tokens_stock,
        "relay": found.kv_tokens_relay,
        "once": found.kv_tokens_once,
        **asdict(found.reasons),
    } == {name: expected[name] for name in ("steps", "stock", "relay", "once", *REASONS)}
    assert sum(expected[name] for name in REASONS) == found.kv_tokens_stock
    assert found.seconds_stock == pytest.approx(stock_seconds)
    assert found.seconds_relay == pytest.approx(relay_seconds)
    for name in ("stock", "relay", "once", "steps"):
        assert sum(getattr(interval, name) for interval in found.intervals) == expected[name]
    assert sum(group.saved for group in found.groups) == expected["saved"]


REASONS = ("saved", "repeated", "first_reads", "other_times", "own", "generated")

# nodes and tokens per level; each leaf is one request
TREES = [
    ([1, 8, 512], [512, 256, 32], 32),
    ([4, 16, 256], [512, 32, 128], 32),
    ([1, 16, 32, 64, 128, 1024], [256, 128, 64, 32, 32, 32], 32),
    ([1, 16, 32, 64, 128, 1024], [256, 128, 64, 32, 32, 32], 16),
]


@pytest.mark.parametrize(("nodes", "tokens", "block"), TREES)
def test_published_trees_are_read_about_once(
    nodes: list[int], tokens: list[int], block: int, tmp_path: Path
) -> None:
    trace = log(tmp_path, tree(nodes, tokens, block), block)
    once = sum(count * length for count, length in zip(nodes, tokens, strict=True))
    for levels, allowed in ((ALL, 1.02), (3, 1.12)):
        found = run(trace, nodes[-1], levels)
        assert found.kv_tokens_once == once
        assert found.kv_tokens_stock == nodes[-1] * sum(tokens)
        assert once <= found.kv_tokens_relay <= allowed * once
        assert found.levels_used <= levels


def test_requests_start_by_their_timestamps_as_places_become_free(tmp_path: Path) -> None:
    # blocks of whom they go with: 5 and 9; 5 and 7
    rows = [
        row(8, 4, [7], timestamp=30),
        row(8, 3, [5], timestamp=10),
        row(8, 2, [9], timestamp=10),
        row(8, 9, [5], timestamp=20),
    ]
    found = run(log(tmp_path, rows), 2)
    # 10: line 2 and 3 for 2 steps; then 2 and 4 for one, which share; 4 and 1 for 4; 4 for 4
    assert [(i.timestamp, i.steps) for i in found.intervals] == [
        (10, 2),
        (20, 1),
        (30, 4),
        (30, 4),
    ]
    assert [interval.stock for interval in found.intervals] == [34, 18, 80, 58]
    assert (found.steps, found.steps_relayed, found.reasons.saved) == (11, 1, 8)
    (group,) = found.groups
    assert (group.start, group.tokens, group.level, group.members) == (0, 8, 1, 2)
    assert (group.steps, group.saved, group.first.line) == (1, 8, 2)


def test_alone_nothing_is_shared(tmp_path: Path) -> None:
    rows = [row(24, 5, [1, 2, 3]) for _ in range(4)]
    found = run(log(tmp_path, rows), 1)
    assert (found.steps, found.saved, found.levels_used, found.groups) == (20, 0, 0, [])
    assert found.reasons.other_times == 20 * 24
    # Contexts of 24 to 28 tokens on our kernels, whose contexts cost more in SECONDS.
    tokens = 4 * sum(range(24, 29))
    stock, ours = 20 * (9 + 0.5) + 1.3 * tokens, 20 * (11 + 0.6) + 1.4 * tokens
    assert found.predicted_speedup == pytest.approx(stock / ours)


def test_samples_of_one_prompt_share_all_its_blocks_from_the_first_step(tmp_path: Path) -> None:
    found = run(log(tmp_path, [row(24, 1, [1, 2, 3])] * 4), 4)
    assert (found.kv_tokens_stock, found.kv_tokens_relay, found.kv_tokens_once) == (96, 24, 24)
    found = run(log(tmp_path, [row(24, 7, [1, 2, 3])] * 3 + [row(24, 5, [1, 2, 3])]), 4)
    (group,) = found.groups  # of four for 5 steps, of three for 2
    assert (group.steps, group.members, group.saved) == (7, 4, (5 * 3 + 2 * 2) * 24)


def test_requests_without_an_answer_take_no_step(tmp_path: Path) -> None:
    found = run(log(tmp_path, [row(24, 0, [1, 2, 3])] * 4), 2)
    assert (found.requests, found.steps, found.saved, found.savable) == (4, 0, 0, 0)
    assert found.predicted_speedup == 1


def test_groups_that_do_not_pay_are_not_made_and_are_accounted_for(tmp_path: Path) -> None:
    trace = log(tmp_path, [row(24, 8, [1, 2, 3])] * 6)
    slow = Costs(
        stock=KernelCosts(read=1.0), context=KernelCosts(read=1.0), system=KernelCosts(call=1e6)
    )
    found = run(trace, 6, costs=slow)
    assert (found.saved, found.levels_used, found.steps_relayed) == (0, 0, 0)
    assert found.reasons.repeated == 8 * 5 * 24 and found.reasons.saved == 0
    assert found.savable > 0.7


def test_fewer_levels_save_less(tmp_path: Path) -> None:
    rows = tree([1, 4, 16, 64], [64, 64, 64, 8], 8)
    saved = [run(log(tmp_path, rows), 64, levels).saved for levels in (1, 2, 3, ALL)]
    assert saved[0] < saved[1] < saved[2] == saved[3]


def test_progress_ends_with_all_requests(tmp_path: Path) -> None:
    said: list[int] = []
    rows = conversations(random.Random(1), 20, BLOCK)
    replay(log(tmp_path, rows), 4, costs=reads(), seconds=SECONDS, max_levels=1, report=said.append)
    assert said == sorted(said)
    assert said[-1] == sum(1 for r in rows if r["output_length"])


@pytest.mark.parametrize(("concurrency", "levels"), [(0, 1), (1, 0)])
def test_no_places_and_no_levels_are_refused(concurrency: int, levels: int) -> None:
    trace = Trace([Request(0, 8, 1, (1,))], BLOCK)
    with pytest.raises(ValueError, match=r"^concurrency and max_levels must be >= 1"):
        run(trace, concurrency, levels)
