"""The interpreter as strict as a GPU or stricter: `any_order`, `in_bounds`."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _sum_of_those_before(x_ptr):
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    before = tl.load(x_ptr + program - 1, mask=program > 0, other=0)
    tl.store(x_ptr + program, before + 1)


def test_a_program_that_reads_what_another_writes_is_seen() -> None:
    results = set()
    for _ in range(20):
        x = torch.zeros(12, dtype=torch.int64)
        _sum_of_those_before[(3, 4)](x)
        results.add(tuple(x.tolist()))
    assert tuple(range(1, 13)) in results and (1,) * 12 in results
    assert len(results) > 4


@triton.jit
def _copy(x_ptr, y_ptr, reads, writes, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < reads, other=0)
    tl.store(y_ptr + at, x, mask=at < writes)


@triton.jit
def _count(x_ptr, at):
    tl.atomic_add(x_ptr + at, 1)


def test_a_kernel_that_leaves_its_tensors_is_seen() -> None:
    memory = torch.arange(16)
    x, y = memory[:8], torch.zeros(8, dtype=torch.int64)
    _copy[(1,)](x, y, 8, 8, SIZE=16)
    assert torch.equal(x, y)
    _count[(1,)](y, 7)
    # The memory behind x is another's, that behind y nobody's.
    for kernel, given in ((_copy, (x, y, 9, 8, 16)), (_copy, (x, y, 8, 9, 16)), (_count, (y, 8))):
        with pytest.raises(Exception, match="a kernel leaves its tensors"):
            kernel[(1,)](*given)
