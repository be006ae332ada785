"""Random changes of JSON values and of their text."""

import copy
import json
import math
from random import Random
from typing import Any

# fmt: off
JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, -(10**400),
    0.5, -0.0, 1.0, 1e-320, 1e308, math.nan, math.inf, -math.inf,
    "", "x", "1", "a\nb", "\x00\x1b[31m\u2028", "\ud800", "é" * 9, "a" * 5000, "bfloat16", "NaN",
    [], {}, [[]], [None], [1, 2], {"": None}, {"a\nb": 1}, {"x": [1.5, "y"]},
)
# Text that replaces a string; no JSON library writes it.
_RAW = {
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@open": '{"a":' * 50_000,
    "@long": "9" * 5000,
    "@huge": "1e999",
    "@twice": '{"a": 1, "a": 2}',
    "@escape": '"\\u0000\\ud800"',
}
# fmt: on


def changed(rng: Random, value: Any, junk: tuple[Any, ...] = JUNK) -> Any:
    """A copy with one change: a value replaced, taken out, doubled, moved or a little different."""
    root = [copy.deepcopy(value)]
    nodes = _nodes(root)
    holder, key = rng.choice(nodes)
    match rng.randrange(8):
        case 0 | 1 | 2:
            holder[key] = copy.deepcopy(rng.choice((*junk, *_RAW)))
        case 3 if holder is not root:
            del holder[key]
        case 4 if isinstance(holder, list) and holder is not root:
            holder.insert(key, copy.deepcopy(holder[key]))
        case 4 if isinstance(holder, dict):
            holder[rng.choice(("x", "", "a\nb", f"{key} ", f"{key}2"))] = holder[key]
        case 5:
            other, place = rng.choice(nodes)
            holder[key] = copy.deepcopy(other[place])
        case 6 if isinstance(holder, dict):
            holder[rng.choice(("", "\x1b[2J", "ü\n", f"{key}{key}"))] = holder.pop(key)
        case _:
            holder[key] = _nudged(rng, holder[key])
    return root[0]


def _nodes(root: list[Any]) -> list[tuple[Any, Any]]:
    """Every value below: its holder and its key there. Long lists count as a few values."""
    found, left = [], [root]
    while left:
        holder = left.pop()
        keys = list(holder) if isinstance(holder, dict) else range(min(len(holder), 5))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                left.append(holder[key])
    return found


def _nudged(rng: Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, 2 * value, float(value % 2**60)))
    if isinstance(value, float):
        return rng.choice((-value, value * 1e300, value / 1e300, str(value)))
    if isinstance(value, str):
        return rng.choice((value + "x", value[:-1], value + "\n", value.upper(), [value]))
    if isinstance(value, list):
        return rng.choice((value * 2, value[::-1], value[1:], [value]))
    return [value]


def text(rng: Random, value: Any) -> bytes:
    """JSON of a value, now and then damaged."""
    written = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    for name, raw in _RAW.items():
        written = written.replace(f'"{name}"', raw)
    content = written.encode(errors="surrogatepass")
    return damaged(rng, content) if rng.random() < 0.1 else content


def damaged(rng: Random, content: bytes) -> bytes:
    """Bytes flipped, put in, taken out, doubled or cut off."""
    at, more = rng.randint(0, len(content)), rng.choice((1, 2, 8, 100))
    match rng.randrange(6):
        case 0:
            flipped = bytes(byte ^ rng.randrange(1, 256) for byte in content[at : at + more])
            return content[:at] + flipped + content[at + more :]
        case 1:
            return content[:at] + rng.randbytes(more) + content[at:]
        case 2:
            return content[:at] + content[at + more :]
        case 3:
            return content[:at] + content[max(0, at - more) : at] + content[at:]
        case 4:
            return content[:at]
        case _:
            put_in = rng.choice((b"\xef\xbb\xbf", b"\n", b"\0", b"NaN", b"\xff", b",", b"[" * 2000))
            return content[:at] + put_in + content[at:]
