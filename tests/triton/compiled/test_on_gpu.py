"""The Triton attention kernels on a GPU."""

from dataclasses import replace

import pytest
import torch

from tests.unit.ops import inputs, test_context, test_system
from vllm_relay.ops import reference
from vllm_relay.ops.attention.providers import PagedContext


def paged_arguments(step, queries, keys):
    """q, caches and context of a provider, from the arguments of `context_attention`."""
    *qkv, table, lens, starts = step
    return *qkv, PagedContext(
        block_table=table,
        context_lens=lens,
        query_start_loc=starts,
        max_query_len=queries,
        max_context_len=keys,
    )


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
def test_paged_groups_on_a_gpu_without_a_sync(dtype):
    from vllm_relay.ops.attention.triton import paged_system_attention

    step = inputs.paged([600, 0, 1031], [70, 3, 41], heads=(32, 8), head_size=128, dtype=dtype)
    on_gpu = [test_context.like_here(x, "cuda") for x in step.args()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = paged_system_attention(*paged_arguments(on_gpu, 70, 1031), 128**-0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact, exact_lse, stock = [], [], []
    for row in range(3):
        q, k, v = step.row(row)
        part, part_lse = reference.attention_lse(q, k, v)
        exact.append(part)
        exact_lse.append(part_lse)
        stock.append(inputs.stock(q, k, v) if k.shape[0] else torch.zeros_like(q))
    inputs.assert_as_good(out.cpu(), torch.cat(stock), torch.cat(exact))
    inputs.assert_lse(lse.cpu(), torch.cat(exact_lse, 1), dtype)


def test_a_captured_graph_follows_new_lengths():
    from vllm_relay.ops.attention.triton import context_attention

    first = inputs.paged([600, 17], [1, 1], heads=(32, 8), head_size=128, dtype=torch.bfloat16)
    lens = torch.tensor([300, 1], dtype=torch.int32)
    on_gpu = [test_context.like_here(x, "cuda") for x in first.args()]

    def attend():
        return context_attention(*paged_arguments(on_gpu, 1, 4096), 128**-0.5)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend()
    on_gpu[4].copy_(lens)
    graph.replay()
    shorter = replace(first, context_lens=lens)
    test_context.check(shorter, lambda *_: (out.cpu(), lse.cpu()))


def test_system_attention_of_many_tiles_on_a_gpu():
    from vllm_relay.ops.attention.triton import system_attention

    q, k, v = test_system.qkv(130, 2100, (32, 8), 128)

    def attend(q, k, v):
        out, lse = system_attention(q.cuda(), k.cuda(), v.cuda(), 128**-0.5)
        return out.cpu(), lse.cpu()

    test_system.check(q, k, v, attend)
