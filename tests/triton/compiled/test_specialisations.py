"""Which specialisations Triton makes of the kernels of a step, by its own binder, without a GPU.

Full graphs are captured at start, for a few sizes; a specialisation that is first met later is
compiled while requests wait, and inside a capture it cannot be loaded at all.
"""

from collections import defaultdict
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vllm_relay.ops.fusion.triton import merge_into
from vllm_relay.ops.planning.device_plan import DevicePlan
from vllm_relay.ops.step.gather import gather_rows

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
# vLLM's default sizes of graphs; smaller ones have no group.
GRAPHS = [2, 4, *range(8, 256, 8), *range(256, 513, 16)]
EAGER = [*range(2, 70), 100, 101, 255, 257, 511, 513, 600, 1000, 1024]
KERNELS = {
    "hash_prefixes_kernel", "match_leaders_kernel", "score_groups_kernel",
    "keep_groups_kernel", "lay_out_kernel", "_gather_kernel", "_fuse_kernel",
}  # fmt: skip
# Specialisations by kernel and key, each with what it would be compiled from.
Met = dict[str, dict[str, dict[str, Any]]]


class NoDevice:
    """Driver and device of the binder; Triton keeps specialisations per device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> "NoDevice":
        return self

    def get_current_stream(self, device: "NoDevice") -> int:
        return 0


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Met:
    """Filled with each that Triton asks for before it would compile and launch it."""
    found: Met = defaultdict(dict)

    def hook(*, key: Any, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        found[fn.jit_function.fn.__name__][str(key)] = compile
        return True  # nothing is compiled, nor launched

    monkeypatch.setattr(driver, "_active", NoDevice())
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    return found


def run_steps(sizes: list[int], levels: int, dense: bool) -> None:
    """The launches of a step of each size, for one layer."""
    plan = DevicePlan(
        max_rows=1024,
        max_tokens=1024,
        max_blocks=300,
        block_size=16,
        min_saved_tokens=24_000,
        max_levels=levels,
        dense=dense,
        device="cpu",
    )
    table = torch.zeros(1024, 300, dtype=torch.int32)
    lens, starts = torch.zeros(1024, dtype=torch.int32), torch.zeros(1025, dtype=torch.int32)
    for rows in sizes:
        step = plan.update(
            table[:rows],
            lens[:rows],
            starts[: rows + 1],
            num_tokens=rows,
            max_query_len=1,
            max_seq_len=8192,
        )
        # As vLLM has it: q is a view of q, k and v side by side.
        width = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
        q = torch.empty(rows, width, dtype=torch.bfloat16)[:, : HEADS * HEAD_SIZE]
        q = q.view(rows, HEADS, HEAD_SIZE)
        gather_rows(q, step.index)
        out, lse = torch.empty(rows, HEADS, HEAD_SIZE, dtype=q.dtype), torch.empty(HEADS, rows)
        parts = step.index.shape[0]
        merge_into(out, lse, [out.clone()] * parts, [lse.clone()] * parts, step.index)


@pytest.mark.parametrize(("levels", "dense"), [(1, False), (2, False), (1, True)])
def test_sizes_after_the_graphs_meet_nothing_new(met: Met, levels: int, dense: bool) -> None:
    run_steps(GRAPHS[::-1], levels, dense)
    assert set(met) == KERNELS
    captured = {name: set(keys) for name, keys in met.items()}
    run_steps(EAGER, levels, dense)
    assert {name: set(made) for name, made in met.items()} == captured
    # Each takes the compiler a second at start.
    assert sum(map(len, captured.values())) <= 12 + 8 * levels
