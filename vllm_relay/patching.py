"""Helpers of `vllm_relay.compat`: find what a patch changes, wrap a method, swap attributes."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Class, name and former value of each replaced method.
_replaced: list[tuple[Any, str, Any]] = []


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

    The function is called with the method, then its arguments. Those that it names are the first of
    the method's, under the same names: vLLM passes some by name. Raises TargetMoved.
    """
    is_class = isinstance(owner, type)
    title = (owner if is_class else type(owner)).__name__
    if not hasattr(owner, name):
        raise TargetMoved(f"this vLLM has no {title}.{name}")
    found = inspect.getattr_static(owner, name) if is_class else getattr(owner, name)
    stock = found.__func__ if isinstance(found, classmethod) else found

    def replace(function: Callable[..., Any]) -> None:
        if hasattr(stock, "_vllm_relay"):
            return
        parameters = inspect.signature(function).parameters.values()
        named = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD][1:]
        theirs = list(inspect.signature(stock).parameters)[: len(named)]
        if named != theirs:
            raise TargetMoved(f"this vLLM's {title}.{name} takes {theirs}, not {named}")
        wrapper = functools.wraps(stock)(lambda *args, **kwargs: function(stock, *args, **kwargs))
        wrapper._vllm_relay = True  # type: ignore[attr-defined]
        if is_class:
            _replaced.append((owner, name, found))
        setattr(owner, name, classmethod(wrapper) if isinstance(found, classmethod) else wrapper)

    return replace


def undo() -> None:
    """Put back what `wrap` has replaced in this process."""
    while _replaced:
        setattr(*_replaced.pop())


@contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Context in which attributes of an object have these values."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
