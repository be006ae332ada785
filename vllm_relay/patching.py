"""The two helpers of `vllm_relay.compat`: find what a patch changes, wrap a method once."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any


class TargetMoved(RuntimeError):
    """vLLM lacks what a patch changes; the message is one line."""


def target(path: str) -> Any:
    """The object at ``module:name``. Raises TargetMoved."""
    module, name = path.split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TargetMoved(f"this vLLM has no {module}.{name}: {error}") from error


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Decorator: replaces method ``name`` of a class or object by the function, once.

    The function is called with the method, then its arguments; vLLM passes some by name, so the
    parameters keep their names. Raises TargetMoved.
    """
    is_class = isinstance(owner, type)
    if not hasattr(owner, name):
        title = (owner if is_class else type(owner)).__name__
        raise TargetMoved(f"this vLLM has no {title}.{name}")
    found = inspect.getattr_static(owner, name) if is_class else getattr(owner, name)
    stock = found.__func__ if isinstance(found, classmethod) else found

    def replace(function: Callable[..., Any]) -> None:
        if hasattr(stock, "_vllm_relay"):
            return
        wrapper = functools.wraps(stock)(lambda *args, **kwargs: function(stock, *args, **kwargs))
        wrapper._vllm_relay = True  # type: ignore[attr-defined]
        setattr(owner, name, classmethod(wrapper) if isinstance(found, classmethod) else wrapper)

    return replace
