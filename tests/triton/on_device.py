"""Tensors whose values the host must not ask for; only kernels see through them."""

from typing import Any

import torch
from triton.runtime import interpreter


class OnDevice(torch.Tensor):
    """A CPU tensor that stands for one on a GPU: reading it on the host would be a sync."""

    FORBIDDEN = frozenset(
        {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__",
         "nonzero", "is_nonzero", "equal", "__array__", "unique", "masked_select"}
    )  # fmt: skip

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        waits = name in cls.FORBIDDEN
        if name == "to":
            waits = any(str(x) == "cpu" for x in (*args[1:], *kwargs.values()))
        elif name == "copy_" and not isinstance(args[0], OnDevice):
            waits = not kwargs.get("non_blocking", False)
        elif name in ("__getitem__", "__setitem__"):
            # How many elements a mask picks has to be known.
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            waits = any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in index)
        if waits:
            raise AssertionError(f"the host reads a device tensor: {name}")
        return super().__torch_function__(func, types, args, kwargs)


def plain(x: Any) -> Any:
    """The values, as a kernel sees them; of tuples and lists, those of their items."""
    if isinstance(x, (tuple, list)):
        return type(x)(plain(y) for y in x)
    return x.as_subclass(torch.Tensor) if isinstance(x, OnDevice) else x


def seeing(function: Any) -> Any:
    """`function` as a kernel."""

    def call(*args, **kwargs):
        return function(*plain(args), **{name: plain(x) for name, x in kwargs.items()})

    return call


def let_triton_see(monkeypatch) -> list[int]:
    """Let Triton's interpreter see values; the list grows by one with each launch."""
    launches: list[int] = []
    stock = interpreter.GridExecutor.__call__

    def launch(self, *args, **kwargs):
        launches.append(1)
        return seeing(stock)(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return launches
