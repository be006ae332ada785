"""Who computes an op: several providers with one signature, chosen by what the tensors allow.

A provider is a function and a test that says why it cannot take a call. For CUDA tensors the first
usable one in order of preference runs, for others a plain one; `use` or the environment variable
VLLM_RELAY_SYSTEM_PROVIDER or VLLM_RELAY_CONTEXT_PROVIDER forces one by name.
"native" are our own CPU kernels, "cpu" PyTorch's, "torch" plain tensor operations on any device.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

Attend = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v, scale) for "system"; (q, k_cache, v_cache, block_table, context_lens, query_start_loc,
scale, max_query_len, max_context_len) for "context". Arguments are checked and there is at least
one query and one key; returns (out, lse) as the op does."""
Usable = Callable[[Tensor, Tensor, Tensor], str | None]
"""(q, k, v) or (q, k_cache, v_cache) -> None, or why the provider cannot take them."""

OPS = ("system", "context")
# Flash kernels first. xformers does not promise that NaN beyond a context stays there, so context
# attention never chooses it by itself.
_CUDA = {
    "system": ("vllm", "flash-attn", "triton", "xformers", "torch"),
    "context": ("vllm", "flash-attn", "triton", "torch"),
}
_CPU = ("native", "cpu")
_OTHER_DEVICES = ("torch",)


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute an op."""

    name: str
    fn: Attend
    usable: Usable


_registered: dict[str, dict[str, Provider]] = {op: {} for op in OPS}
_forced: dict[str, str | None] = dict.fromkeys(OPS)


def anything(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The `usable` of a provider that takes every checked call."""
    return None


def register(op: str, name: str, fn: Attend, usable: Usable = anything) -> None:
    """Add a provider, or replace the one of that name.

    Raises:
        ValueError: op is neither "system" nor "context".
    """
    _of(op)[name] = Provider(name, fn, usable)


class use:
    """Force a provider for the whole process; as a context manager, until the block ends.

    use("system", "triton"); with use("context", "torch"): ...; None chooses again. Stronger than
    the environment variable.

    Raises:
        ValueError: the op or the provider is unknown.
    """

    def __init__(self, op: str, name: str | None) -> None:
        if name is not None:
            _known(op, name)
        _of(op)
        self._op = op
        self._before = _forced[op]
        _forced[op] = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _forced[self._op] = self._before


def choose(op: str, q: Tensor, k: Tensor, v: Tensor) -> Provider:
    """The provider for these tensors.

    Raises:
        ValueError: the forced provider is unknown or cannot take them; names it and says why.
    """
    name = _forced[op] or os.environ.get(f"VLLM_RELAY_{op.upper()}_PROVIDER")
    if name:
        provider = _known(op, name)
        reason = provider.usable(q, k, v)
        if reason:
            raise ValueError(f"{op} provider {name!r} is not usable here: {reason}")
        return provider
    kind = q.device.type
    reasons = []
    for name in _CPU if kind == "cpu" else _CUDA[op] if kind == "cuda" else _OTHER_DEVICES:
        candidate = _registered[op].get(name)
        if candidate is None:
            continue
        reason = candidate.usable(q, k, v)
        if reason is None:
            return candidate
        reasons.append(f"{name}: {reason}")
    raise ValueError(f"no {op} provider for {q.device}: {'; '.join(reasons)}")


@cache
def module(name: str) -> Any:
    """The module, or a text that says why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        # A package built for another torch fails in many ways.
        return f"{name} cannot be imported: {error}"


def missing(name: str) -> str | None:
    """None where the module can be imported, which this does; else why not."""
    found = module(name)
    return found if isinstance(found, str) else None


def not_cpu(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why a CPU kernel cannot take these tensors, or None."""
    return None if q.device.type == "cpu" else "needs CPU tensors"


def not_triton(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why our Triton kernels cannot take these tensors, or None; any strides will do."""
    if q.shape[-1] > 256:
        return f"needs a head size up to 256, not {q.shape[-1]}"
    if q.is_cuda:
        return old_device(q) or missing("triton")
    if q.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return "needs CUDA tensors, or TRITON_INTERPRET=1 for the interpreter"
    if q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    return missing("triton")


def not_flash(q: Tensor, k: Tensor, v: Tensor, block_multiple: int = 1) -> str | None:
    """Why FlashAttention cannot take these tensors (FlashAttention 2, csrc/flash_api.cpp)."""
    if not q.is_cuda:
        return "needs CUDA tensors"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, not {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"needs a head size that is a multiple of 8 up to 256, not {q.shape[-1]}"
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return "needs q, k and v whose channels are adjacent in memory"
    if k.dim() == 4 and k.shape[1] % block_multiple:
        return f"needs KV blocks of a multiple of {block_multiple} tokens, not {k.shape[1]}"
    return old_device(q)


def old_device(q: Tensor) -> str | None:
    """None from compute capability 8.0 on."""
    if _capability(q.device.index) < (8, 0):
        return "needs compute capability 8.0 or more"
    return None


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _of(op: str) -> dict[str, Provider]:
    if op not in _registered:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    return _registered[op]


def _known(op: str, name: str) -> Provider:
    known = _of(op)
    if name not in known:
        raise ValueError(f"{op} provider {name!r} is unknown; there are {', '.join(sorted(known))}")
    return known[name]
