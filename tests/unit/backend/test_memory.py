"""What relay takes on a CPU fits beside the KV cache in the memory that there is."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.backend.cpu_bench import BLOCK, make_bench, make_step
from vllm_relay.backend import memory
from vllm_relay.backend.memory import MemoryBound, memory_bound
from vllm_relay.backend.step_planner import StepPlanner
from vllm_relay.ops.step.native import partial_bytes

GIB = 2**30


def bound_of(monkeypatch: Any, free: float, *, blocks: int | None = 1000, **given: Any) -> Any:
    """The bound where ``free`` GiB are free and a KV cache of 1 GiB is yet to be touched."""
    monkeypatch.setattr(
        memory,
        "get_memory_node_info",
        lambda node: SimpleNamespace(available_memory=int(free * GIB)),
    )
    monkeypatch.setattr(memory, "_cgroup_room", lambda: given.get("room", math.inf))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            num_gpu_blocks=blocks, kv_cache_memory_bytes=given.get("kv_bytes")
        ),
        parallel_config=SimpleNamespace(
            world_size=given.get("workers", 1), data_parallel_size_local=given.get("local", 1)
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    )
    numbers = GIB // 1000, given.get("token", 0), given.get("gib"), given.get("share", 1.0)
    return memory_bound(config, *numbers)


@pytest.mark.parametrize("free", [0.1, 1.0, 1.5, 3.0, 24.0, 500.0])
@pytest.mark.parametrize("token", [0, partial_bytes(3, 32, 128), partial_bytes(3, 128, 256)])
@pytest.mark.parametrize("workers", [1, 4])
def test_all_workers_fit_into_half_of_what_their_kv_caches_leave(
    monkeypatch: Any, free: float, token: int, workers: int
) -> None:
    bound = bound_of(monkeypatch, free, token=token, workers=workers)
    left = max(int(free * GIB) - workers * (GIB // 1000 * 1000), 0)
    assert 0 <= workers * bound.total <= left / 2
    assert bound.packed <= 2 * GIB and bound.partials >= 0


def test_with_much_memory_nothing_is_cut(monkeypatch: Any) -> None:
    token = partial_bytes(3, 32, 128)
    assert bound_of(monkeypatch, 24, token=token) == MemoryBound(2 * GIB, 8192 * token)


def test_a_setting_overrides_what_fits(monkeypatch: Any) -> None:
    assert bound_of(monkeypatch, 0.1, gib=4).packed == 4 * GIB
    assert bound_of(monkeypatch, 24, gib=0).packed == 0


def test_a_kv_cache_of_a_stated_size_counts_before_its_blocks_are_known(monkeypatch: Any) -> None:
    assert bound_of(monkeypatch, 3, blocks=None, kv_bytes=2 * GIB).packed == GIB // 2


def test_a_step_beyond_the_bound_of_partials_has_no_groups() -> None:
    bench = make_bench(8, 2, 64, torch.bfloat16, "vec", 21)
    common = make_step([[1, 2, 3, 10], [1, 2, 3, 15]], [97, 120])
    assert bench.builder.planner is not None
    planner = bench.builder.planner
    planner._max_partial_bytes = 2 * partial_bytes(1, 8, 64)
    assert _groups(planner, common) == 1
    planner._max_partial_bytes -= 1
    assert _groups(planner, common) == 0


def _groups(planner: StepPlanner, common: Any) -> int:
    (found,) = planner.plan(common).values()
    return found.stats.groups


def test_the_partials_of_a_long_step_of_wide_layers_are_counted_whole() -> None:
    bench = make_bench(64, 8, 256, torch.bfloat16, "vec", 21)
    planner, own, shared = bench.builder.planner, 8192 // BLOCK, 64
    assert planner is not None
    prefix = list(range(1, shared + 1))
    table = [prefix + list(range(1000 * i, 1000 * i + own)) for i in (1, 2)]
    common = SimpleNamespace(
        num_reqs=2,
        block_table_tensor=torch.tensor(table, dtype=torch.int32),
        seq_lens=torch.tensor([(shared + own) * BLOCK] * 2, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 8192, 16384], dtype=torch.int32),
        slot_mapping=torch.arange(40_000, 40_000 + 16384),
        causal=True,
    )
    need = 16384 * partial_bytes(1, 64, 256)
    assert need > 2**31  # more than the integers of vLLM's metadata hold
    planner._max_partial_bytes = need
    assert _groups(planner, common) == 1
    planner._max_partial_bytes -= 1
    assert _groups(planner, common) == 0


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), (5 / 6, 1 / 6)])
@pytest.mark.parametrize("free", [1.2, 3.0, 500.0])
def test_all_kv_cache_groups_of_a_worker_fit(
    monkeypatch: Any, free: float, shares: tuple[float, ...]
) -> None:
    token = partial_bytes(3, 128, 256)
    bounds = [bound_of(monkeypatch, free, token=token, share=share) for share in shares]
    assert sum(bound.total for bound in bounds) <= (int(free * GIB) - GIB // 1000 * 1000) / 2


def test_a_node_whose_engines_are_all_elsewhere_is_counted_as_one(monkeypatch: Any) -> None:
    assert bound_of(monkeypatch, 3, local=0) == bound_of(monkeypatch, 3)


def test_the_narrowest_cgroup_above_a_process_counts(monkeypatch: Any, tmp_path: Path) -> None:
    own = tmp_path / "system.slice" / "vllm.service"
    own.mkdir(parents=True)
    for folder, limit in ((tmp_path, "max"), (own.parent, "5000"), (own, "9000")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("2000")
        (folder / "memory.stat").write_text("anon 1500\nactive_file 300\ninactive_file 100\n")
    told = tmp_path / "cgroup"
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUP", told)
    assert memory._cgroup_room() == math.inf
    told.write_text("4:memory:/elsewhere\n0::/system.slice/vllm.service\n")
    assert memory._cgroup_room() == 5000 - 2000 + 400
    told.write_text("0::/\n")
    assert memory._cgroup_room() == math.inf
    monkeypatch.undo()
    assert bound_of(monkeypatch, 24, room=3 * GIB) == bound_of(monkeypatch, 3)
