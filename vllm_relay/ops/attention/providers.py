"""The registry of attention providers: who computes system and context attention.

A provider is a module (or any object) with the functions of `Implementation` for its ops. The first
one that can take the tensors runs; `use` or the environment variables VLLM_RELAY_SYSTEM_PROVIDER
and VLLM_RELAY_CONTEXT_PROVIDER force one by name.

To add one: a module ``ops/attention/NAME.py`` and a line in `_registered` (see CONTRIBUTING.md).
With ``paged_system_attention``, too, all groups of a level are one call.
"""

import importlib
import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

OPS = ("system", "context")


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedContext:
    """Where the keys of each request lie in a paged cache, and which queries are its own."""

    block_table: Tensor
    """[R, M] int32 or int64; only the first ceil(context_len / block_size) columns are read."""
    context_lens: Tensor
    """[R] int32 or int64."""
    query_start_loc: Tensor
    """[R + 1] int32 or int64: request r has the queries loc[r] .. loc[r + 1]."""
    max_query_len: int
    """At least the queries of any request."""
    max_context_len: int
    """At least the context of any request."""


class Implementation(Protocol):
    """Both ops, or one, as a module computes them. Arguments are checked; no size is 0."""

    def system_attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`vllm_relay.ops.system_attention`."""

    def context_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, context: PagedContext, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`vllm_relay.ops.context_attention`."""

    def unusable(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why the provider cannot take these tensors, or None; k and v are 4-d for context."""


@dataclass(frozen=True)
class Provider:
    """A name for an implementation, and where it is chosen without being forced."""

    name: str
    source: Any
    """An `Implementation`, or the name of the module that is one."""
    devices: Collection[str] = ()
    """Types of devices whose tensors it is offered; empty: only when forced."""
    ops: Collection[str] = OPS
    """Ops that it has."""

    @property
    def implementation(self) -> Implementation:
        """The functions; loads the module, or is the text that says why that failed."""
        found: Implementation = self.source
        if isinstance(self.source, str):
            found = module(f"vllm_relay.ops.attention.{self.source}")
        return found

    def unusable(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why the provider cannot take these tensors, or None."""
        found = self.implementation
        return found if isinstance(found, str) else found.unusable(q, k, v)


# In order of preference: our CPU kernels; on CUDA flash kernels first. xformers does not promise
# that NaN beyond a paged context stays there.
_registered = {
    "native": Provider("native", "native", ["cpu"]),
    "flash-attn": Provider("flash-attn", "flash_attn", ["cuda"]),
    "triton": Provider("triton", "triton", ["cuda"]),
    "xformers": Provider("xformers", "xformers", ["cuda"], ops=["system"]),
    "torch": Provider("torch", "torch"),  # any device, last
}
_forced: dict[str, str | None] = dict.fromkeys(OPS)


def register(
    name: str,
    implementation: object,
    devices: Collection[str] = (),
    ops: Collection[str] = OPS,
) -> None:
    """Add an `Implementation` before all others, or replace the one of that name.

    devices: types of devices ("cuda") where it is chosen by itself; empty: only when forced.
    """
    others = {key: other for key, other in _registered.items() if key != name}
    _registered.clear()
    _registered.update({name: Provider(name, implementation, devices, ops), **others})


def use(op: str, name: str | None) -> ExitStack:
    """Force a provider for the whole process; as a context manager, until the block ends.

    use("system", "triton"); with use("context", "torch"): ...; None chooses again. Stronger than
    the environment variable.

    Raises:
        ValueError: the op or the provider is unknown.
    """
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if name is not None:
        _known(op, name)
    end = ExitStack()
    end.callback(_forced.__setitem__, op, _forced[op])
    _forced[op] = name
    return end


def choose(op: str, q: Tensor, k: Tensor, v: Tensor) -> Provider:
    """The provider of "system" or "context" for these tensors.

    Raises ValueError if the forced one is unknown or cannot take them; names it and says why.
    """
    name = _forced[op] or os.environ.get(f"VLLM_RELAY_{op.upper()}_PROVIDER")
    if name:
        provider = _known(op, name)
        reason = provider.unusable(q, k, v)
        if reason:
            raise ValueError(f"{op} provider {name!r} is not usable here: {reason}")
        return provider
    for provider in _registered.values():
        offered = q.device.type in provider.devices and op in provider.ops
        if offered and provider.unusable(q, k, v) is None:
            return provider
    return _registered["torch"]


def _known(op: str, name: str) -> Provider:
    if name not in _registered or op not in _registered[name].ops:
        names = ", ".join(sorted(key for key, found in _registered.items() if op in found.ops))
        raise ValueError(f"{op} provider {name!r} is unknown; there are {names}")
    return _registered[name]


@cache
def module(name: str) -> Any:
    """The module, or a text that says why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        # A package built for another torch fails in many ways.
        return f"{name} cannot be imported: {error}"


def missing(name: str) -> str | None:
    """None if the module can be imported, which this does; else why not."""
    found = module(name)
    return found if isinstance(found, str) else None


def old_device(q: Tensor) -> str | None:
    """None from compute capability 8.0 on; else the reason."""
    if _capability(q.device.index) < (8, 0):
        return "needs compute capability 8.0 or more"
    return None


def not_flash(q: Tensor, k: Tensor, v: Tensor, block_multiple: int = 1) -> str | None:
    """Why FlashAttention cannot take these tensors (FlashAttention 2, csrc/flash_api.cpp).

    block_multiple: tokens that a KV block, if k is paged (4-d), is a multiple of.
    """
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


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
