"""Arguments that the host gives a layer's kernels, which a CUDA graph keeps from its capture."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime import interpreter
from vllm.v1.attention.backends import flash_attn

# An upper bound, of which FlashAttention's programs and schedule do not depend.
BOUNDS = {"max_seqlen_k"}


def kept_buffers(bench: Any) -> set[int]:
    """Memory that outlives a step: the runner's, the cache, the plan's, the schedules'."""
    builders = [*bench.builder._schedules._levels, bench.builder._schedules._context]
    tensors = [
        *vars(bench.buffers).values(),
        *vars(bench.builder.device_plan.buffers).values(),
        *(builder.scheduler_metadata for builder in builders),
        bench.cache,
    ]
    return {x.untyped_storage().data_ptr() for x in tensors}


@contextmanager
def host_view(bench: Any) -> Iterator[list[Any]]:
    """Calls of FlashAttention and launches of Triton kernels, as the host makes them.

    A tensor is its shape, strides, dtype and, if its memory outlives the step, its address: what a
    layer allocates has an address of the graph's own.
    """
    kept, calls = kept_buffers(bench), []

    def of(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return tuple(map(of, x))
        if not isinstance(x, torch.Tensor):
            return x
        address = x.data_ptr() if x.untyped_storage().data_ptr() in kept else None
        return tuple(x.shape), x.stride(), x.dtype, address

    def note(name: str, args: Any, kwargs: Any) -> None:
        given = {key: of(value) for key, value in kwargs.items() if key not in BOUNDS}
        calls.append((name, of(args), given))

    varlen, launch = flash_attn.flash_attn_varlen_func, interpreter.GridExecutor.__call__

    def noted_varlen(**kwargs: Any) -> Any:
        note("flash_attn_varlen_func", (), kwargs)
        return varlen(**kwargs)

    def noted_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self.fn.__name__, (self.grid, *args), kwargs)
        return launch(self, *args, **kwargs)

    flash_attn.flash_attn_varlen_func = noted_varlen
    interpreter.GridExecutor.__call__ = noted_launch
    try:
        yield calls
    finally:
        flash_attn.flash_attn_varlen_func = varlen
        interpreter.GridExecutor.__call__ = launch
