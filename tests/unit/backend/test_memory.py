"""What relay takes on a CPU fits beside the KV cache in the memory that there is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.backend.cpu_bench import make_bench, make_step
from vllm_relay.backend import cpu, cpu_impl, memory
from vllm_relay.backend.memory import MemoryBound, memory_bound
from vllm_relay.ops.step.native import partial_bytes

GIB = 2**30


def bound_of(monkeypatch: Any, free: float, *, blocks: int | None = 1000, **given: Any) -> Any:
    """The bound where ``free`` GiB are free and a KV cache of 1 GiB is yet to be touched."""
    monkeypatch.setattr(
        memory,
        "get_memory_node_info",
        lambda node: SimpleNamespace(available_memory=int(free * GIB)),
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            num_gpu_blocks=blocks, kv_cache_memory_bytes=given.get("kv_bytes")
        ),
        parallel_config=SimpleNamespace(
            world_size=given.get("workers", 1), data_parallel_size_local=1
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    )
    return memory_bound(config, GIB // 1000, given.get("token", 0), given.get("gib"))


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


def test_a_step_beyond_the_bound_of_partials_is_vllms_own() -> None:
    bench = make_bench(8, 2, 64, torch.bfloat16, "vec", 21)
    common = make_step([[1, 2, 3, 10], [1, 2, 3, 15]], [97, 120])
    assert bench.builder.planner is not None
    planner = bench.builder.planner
    planner._max_partial_bytes = 2 * partial_bytes(1, 8, 64)
    assert isinstance(bench.builder.build(0, common), cpu_impl.RelayMetadata)
    planner._max_partial_bytes -= 1
    assert type(bench.builder.build(0, common)) is cpu.CPUAttentionMetadata
