"""Checks of what comes from outside (settings, JSON, files): each fault is one line of text."""

import json
import re
import reprlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError

T = TypeVar("T")

_MOST = 2**63  # numbers that fit into arrays and floats
Count = Annotated[StrictInt, Field(ge=0, lt=_MOST)]
Positive = Annotated[StrictInt, Field(ge=1, lt=_MOST)]
Amount = Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[StrictStr, Field(min_length=1)]
# One line without control characters, as the log shows it.
_CONTROL = r"\x00-\x1f\x7f\u0085\u2028\u2029"
Line = Annotated[StrictStr, Field(max_length=4096, pattern=rf"^[^{_CONTROL}]*$")]
# What one line of a log, or of a terminal, cannot show.
_NOT_SHOWN = re.compile(f"[{_CONTROL}\ud800-\udfff]")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def checked(kind: type[T], given: Any, where: str) -> T:
    """``given`` as a value of ``kind``: a dataclass, of a mapping, or a type that pydantic knows.

    Args:
        where: text before the place of a fault, such as "relay." or "log.jsonl:3: ".

    Raises:
        ValueError: the first fault, in one line: its place, what must be there, what is there.
    """
    try:
        value: T = _adapter(kind).validate_python(given)
        return value
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    place = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in fault["loc"])
    place = one_line(where + place.removeprefix(".")).rstrip()
    match fault["type"]:
        case "value_error":  # of a validator of ours, which names the place itself
            raise ValueError(str(fault["ctx"]["error"]))
        case "missing":
            raise ValueError(f"{place} is missing")
        case "unexpected_keyword_argument" | "extra_forbidden":
            known = [field.name for field in fields(kind)] if is_dataclass(kind) else []
            listed = (
                f"; known: {', '.join(known)}" if known and fault["loc"][0] not in known else ""
            )
            raise ValueError(f"{place} is unknown{listed}")
    reason = re.sub(r"^\w+ should", "must", fault["msg"]).replace("greater than or equal to", ">=")
    raise ValueError(f"{place} {reason}, got {reprlib.repr(fault['input'])}")


def one_line(text: str) -> str:
    """The text with control characters and lone surrogates escaped."""
    return _NOT_SHOWN.sub(lambda found: repr(found[0])[1:-1], text)


def parse_json(content: bytes, where: str) -> Any:
    """A JSON text, in UTF-8. Raises ValueError, with ``where`` as in `checked`."""
    try:
        return json.loads(content)
    except UnicodeDecodeError:
        raise ValueError(f"{where}is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}is not JSON: {error}") from None
