"""The systems that part ``op`` compares, each made ready for a batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.batches import BLOCK, Batch, shared_in_a_row
from benchmarks.gpu.flash import Scheduled, attend_with, flash_attention, schedule, stock_attention
from benchmarks.gpu.flash_check import context_part
from benchmarks.gpu.timing import DecodeStep
from vllm_relay.ops.planning.splits import processors_of, system_splits

# Reads that a group has to save for relay to be expected.
MIN_SAVED_TOKENS = 32768
# Those of `vllm_relay.backend.cuda_history`, restated: it imports vLLM.
PROBE_STEPS, HEARD_AFTER = 8, 2
# vLLM's default in full graphs (flash_attn_max_num_splits_for_cuda_graph).
GRAPH_SPLITS = 32

# Writes the given tensor and returns None, or returns one of its own.
Run = Callable[[Tensor], Tensor | None]
Prepare = Callable[
    [Batch, DecodeStep], tuple[Run, int | None]
]  # and the groups it found, if it looks


def stock(batch: Batch, shape: DecodeStep) -> tuple[Run, int | None]:
    """One call of FA3, left to choose its own splits."""
    varlen = flash_attention(3)
    return lambda out: stock_attention(batch, varlen, out), None


def stock_graphs(batch: Batch, shape: DecodeStep) -> tuple[Run, int | None]:
    """One call of FA3 as in vLLM's graphs; the schedule is made before, once for all layers."""
    varlen = flash_attention(3)
    told = schedule(batch, context_part(batch), GRAPH_SPLITS)
    return lambda out: stock_attention(batch, varlen, out, told), None


def wait_for(device: torch.device) -> None:
    """Until everything that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relay_step(plan: Any, batch: Batch) -> Any:
    """Plan a batch with one query per row, as the backend does; returns what attention takes."""
    return plan.update(
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        num_tokens=len(batch.q),
        max_query_len=1,
        max_seq_len=batch.longest,
    )


def scheduled(step: Any, batch: Batch) -> Any:
    """A planned step with FA3's schedules, as the backend has it in full graphs."""
    tokens, heads, _ = batch.q.shape
    processors = processors_of(batch.q.device)
    splits = system_splits(tokens, heads, batch.k_cache.shape[2], processors, GRAPH_SPLITS)
    dense = step.dense and Scheduled(step.dense, splits, None)
    levels = [schedule(batch, part, splits) for part in step.levels]
    context = schedule(batch, step.context, GRAPH_SPLITS)
    return replace(step, levels=levels, context=context, dense=dense)


def relay(
    batch: Batch,
    shape: DecodeStep,
    *,
    planned_before: bool = False,
    dense: bool = False,
    free: bool = False,
) -> tuple[Run, int | None]:
    """Plan, schedules and attention in one graph; also returns the groups found.

    Args:
        planned_before: plan and schedules before it: what each further layer of a step adds.
        dense: the same, with the shared blocks in a row and attended as dense KV.
        free: without schedules, FA3 chooses its own splits.
    """
    from vllm_relay.ops.planning.device_plan import DevicePlan
    from vllm_relay.ops.step.paged import paged_relay

    if dense:
        batch = shared_in_a_row(batch, shape)
    rows, columns = batch.block_table.shape
    plan = DevicePlan(
        max_rows=rows,
        max_tokens=rows,
        max_blocks=columns,
        block_size=BLOCK,
        min_saved_tokens=MIN_SAVED_TOKENS,
        dense=dense,
        device=batch.q.device,
    )
    attend = attend_with(flash_attention(3))
    # As the backend does in a graph: system attention beside context attention.
    side = torch.cuda.Stream() if batch.q.is_cuda else None

    def prepare() -> Any:
        step = relay_step(plan, batch)
        return step if free else scheduled(step, batch)

    def attention(out: Tensor, step: Any) -> None:
        paged_relay(batch.q, batch.k_cache, batch.v_cache, step, attend, out=out, side=side)

    before = prepare()
    wait_for(batch.q.device)
    groups = plan.newest()[0].groups
    if planned_before or dense:
        return (lambda out: attention(out, before)), groups
    return (lambda out: attention(out, prepare())), groups


def cascade_pages(table: Tensor, shape: DecodeStep) -> tuple[list[Tensor], ...]:
    """FlashInfer's description of a `shared_batch`: query offsets, page offsets, pages, tokens in
    the last page; each for the shared level and then for the requests' own."""
    device, prefix = table.device, shape.shared // BLOCK
    own = table.shape[1] - prefix

    def offsets(count: int, step: int) -> Tensor:
        return torch.arange(count + 1, device=device, dtype=torch.int32) * step

    def last(count: int, tokens: int) -> Tensor:
        left = (tokens - 1) % BLOCK + 1
        return torch.full((count,), left, device=device, dtype=torch.int32)

    return (
        [offsets(1, shape.batch), offsets(shape.batch, 1)],
        [offsets(1, prefix), offsets(shape.batch, own)],
        [table[0, :prefix].contiguous(), table[:, prefix:].reshape(-1)],
        [last(1, shape.shared), last(shape.batch, shape.own)],
    )


def flashinfer(batch: Batch, shape: DecodeStep) -> tuple[Run, int | None]:
    """MultiLevelCascadeAttentionWrapper, told what is shared and planned outside the timing.

    On K and V in tensors of their own, its usual layout. The first call compiles for minutes.
    """
    from flashinfer import MultiLevelCascadeAttentionWrapper

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    dtype = batch.q.dtype
    wrapper.plan(
        *cascade_pages(batch.block_table, shape),
        shape.query_heads,
        shape.kv_heads,
        shape.head_size,
        BLOCK,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    caches = batch.k_cache.contiguous(), batch.v_cache.contiguous()
    return lambda out: wrapper.run(batch.q, caches), 1


# name -> how it is made ready; whether it needs something shared
SYSTEMS: dict[str, tuple[Prepare, bool]] = {
    "stock": (stock, False),
    "stock-graphs": (stock_graphs, False),
    "relay": (relay, False),
    "relay-layer": (partial(relay, planned_before=True), False),
    "relay-free": (partial(relay, free=True), False),
    "relay-dense": (partial(relay, dense=True), True),
    "flashinfer": (flashinfer, True),
}
