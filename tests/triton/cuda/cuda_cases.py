"""Steps of the CUDA backend's tests, and their comparison with the stock backend."""

import torch
from vllm.v1.attention.backends import flash_attn

from tests import reference_flash
from tests.triton.cuda.cuda_bench import Bench, Step

# float32 sums in another order, of values of about 1
CLOSE = {"rtol": 0, "atol": 2e-6}


def install(monkeypatch, version: int = 3) -> None:
    reference_flash.install(
        lambda name, value: monkeypatch.setattr(flash_attn, name, value, raising=False), version
    )


SHARED = Step(
    # Two groups that interleave, and one row alone.
    [
        ([5, 6, 7, 70], 55, 1),
        ([9, 8, 71], 40, 1),
        ([5, 6, 7, 72], 49, 1),
        ([73, 74], 20, 1),
        ([9, 8, 75, 76], 60, 1),
        ([5, 6, 7, 77], 64, 1),
    ]
)
ALONE = Step([([5, 6], 20, 1), ([7, 8, 9], 40, 1)])


def owned(step: Step) -> int:
    return sum(queries for _, _, queries in step.rows)


def check(bench: Bench, step: Step, metadata, layer: int = 0) -> None:
    q = bench.queries(metadata.num_actual_tokens)
    got = bench.forward(metadata, q, layer)
    want = bench.stock(step, q, layer)
    torch.testing.assert_close(got[: owned(step)], want[: owned(step)], **CLOSE)
    if flash_attn.get_flash_attn_version() > 2:
        assert got[owned(step) :].isnan().all(), "tokens of padding are not to be written"


def relayed(metadata) -> bool:
    return getattr(metadata, "plan", None) is not None
