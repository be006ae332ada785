"""Request logs: JSON lines -> the requests, with the KV blocks that their prompts would lie in."""

import json
import reprlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Text of a prompt, or its chat messages, to token ids.
Tokenize = Callable[[str | list[Any]], list[int]]

# Of rows that do not say how many tokens the answer had.
DEFAULT_OUTPUT = 256
# Tokens per block where nobody says: rows of hashes are read as Mooncake's, tokens as vLLM's.
HASHED_BLOCK, TOKEN_BLOCK = 512, 16
_MOST = 2**31  # lengths are int32 from here on
_KINDS = ("hash_ids", "prompt_token_ids", "prompt", "messages")


@dataclass(frozen=True)
class Request:
    """One row of a log.

    Attributes:
        timestamp: milliseconds. input_length, output_length: tokens of the prompt, of the answer.
        blocks: physical ids, from 1 on, of the blocks that the prompt fills: two requests hold the
            same one iff their prompts are the same up to its end.
        line: of the file, from 1 on. text: the prompt, where the row has it.
    """

    timestamp: float
    input_length: int
    output_length: int
    blocks: tuple[int, ...] = field(repr=False)
    line: int = 0
    text: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Trace:
    """Requests in the order of the file, and tokens per block."""

    requests: list[Request]
    block_tokens: int


def read_trace(
    path: Path, block_tokens: int | None = None, tokenize: Tokenize | None = None
) -> Trace:
    """Read a log; each row says what its prompt was in one of these ways.

    ``{"hash_ids": [...], "input_length": n, "output_length": n}``: one id per block of the prompt,
    as in Mooncake's traces; the last block may be partly filled. Or, with the length of the answer
    as ``output_length`` or ``max_tokens`` (else `DEFAULT_OUTPUT`), ``{"prompt_token_ids": [...]}``,
    ``{"prompt": "text" or token ids}`` or ``{"messages": [...]}``. ``timestamp`` is optional.

    Args:
        block_tokens: tokens per block; 512 where None for rows of hashes and 16 for others.
        tokenize: for text and messages.

    Raises:
        ValueError: naming the file, the line and what is wrong there.
        OSError: the file cannot be read.
    """
    rows: list[tuple[int, str, dict[str, Any]]] = []
    with path.open("rb") as file:
        for line, content in enumerate(file, 1):
            if content.strip():
                rows.append((line, *_row(content, f"{path}:{line}")))
    if not rows:
        raise ValueError(f"{path}: is empty")
    hashed = {kind == "hash_ids" for _, kind, _ in rows}
    if block_tokens is None:
        if len(hashed) > 1:
            raise ValueError(
                f"{path}: some rows hold hash_ids, others tokens: say how many tokens a block has"
            )
        block_tokens = HASHED_BLOCK if True in hashed else TOKEN_BLOCK
    paths = _Paths()
    requests = []
    for line, kind, row in rows:
        where = f"{path}:{line}"
        if kind == "hash_ids":
            requests.append(_hashed(row, where, line, block_tokens, paths))
        else:
            requests.append(_tokens(row, kind, where, line, block_tokens, tokenize, paths))
    return Trace(requests, block_tokens)


class _Paths:
    """Ids of blocks from what they hold and what lies before them.

    A trace's hash should say both already. But a block's identity is its path: an id that comes
    again after other blocks is another block.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, Hashable], int] = {}

    def __call__(self, contents: Iterable[Hashable]) -> tuple[int, ...]:
        block, blocks = 0, []
        for content in contents:
            block = self._ids.setdefault((block, content), len(self._ids) + 1)
            blocks.append(block)
        return tuple(blocks)


def _row(content: bytes, where: str) -> tuple[str, dict[str, Any]]:
    """How a row says what its prompt was, and the row."""
    try:
        row = json.loads(content)
    except UnicodeDecodeError:
        raise ValueError(f"{where}: is not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be an object, one per line")
    kind = next((kind for kind in _KINDS if kind in row), None)
    if kind is None:
        raise ValueError(f"{where}: has none of {', '.join(_KINDS)}")
    return kind, row


def _hashed(
    row: dict[str, Any], where: str, line: int, block_tokens: int, paths: _Paths
) -> Request:
    tokens = _length(row, "input_length", where)
    output = _length(row, "output_length", where)
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(type(x) is int for x in ids):
        raise ValueError(f"{where}: hash_ids must be a list of whole numbers")
    full = tokens // block_tokens
    if not full <= len(ids) <= -(-tokens // block_tokens):
        raise ValueError(
            f"{where}: {len(ids)} hash_ids for {tokens} tokens of input; blocks of {block_tokens} "
            f"tokens make {-(-tokens // block_tokens)}"
        )
    _check_sum(tokens, output, where)
    return Request(_timestamp(row, where), tokens, output, paths(ids[:full]), line)


def _tokens(
    row: dict[str, Any],
    kind: str,
    where: str,
    line: int,
    block_tokens: int,
    tokenize: Tokenize | None,
    paths: _Paths,
) -> Request:
    prompt, text = row[kind], None
    if kind == "messages" or isinstance(prompt, str):
        text = _text(prompt, where)
        if tokenize is None:
            raise ValueError(f"{where}: {kind} needs a tokenizer: give its folder")
        try:
            prompt = tokenize(prompt)
        except Exception as error:  # of somebody else's template
            raise ValueError(f"{where}: the tokenizer refuses {kind}: {error}") from error
    if not isinstance(prompt, list) or not all(type(t) is int and t >= 0 for t in prompt):
        raise ValueError(f"{where}: {kind} must be a list of token ids")
    name = next((n for n in ("output_length", "max_tokens") if row.get(n) is not None), None)
    output = DEFAULT_OUTPUT if name is None else _length(row, name, where)
    _check_sum(len(prompt), output, where)
    full = range(0, len(prompt) // block_tokens * block_tokens, block_tokens)
    blocks = paths(tuple(prompt[start : start + block_tokens]) for start in full)
    return Request(_timestamp(row, where), len(prompt), output, blocks, line, text)


def _text(prompt: str | Any, where: str) -> str:
    """A prompt for people."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(isinstance(m, dict) for m in prompt):
        raise ValueError(f"{where}: messages must be a list of objects")
    return " ".join(m["content"] for m in prompt if isinstance(m.get("content"), str))


def _length(row: dict[str, Any], name: str, where: str) -> int:
    if name not in row:
        raise ValueError(f"{where}: {name} is missing")
    value = row[name]
    if type(value) is not int or value < 0:
        shown = reprlib.repr(value)
        raise ValueError(f"{where}: {name} must be a whole number >= 0, got {shown}")
    return value


def _check_sum(tokens: int, output: int, where: str) -> None:
    if tokens + output >= _MOST:
        raise ValueError(f"{where}: {tokens} + {output} tokens are too many for one request")


def _timestamp(row: dict[str, Any], where: str) -> float:
    value = row.get("timestamp")
    if value is None:
        return 0.0
    if type(value) not in (int, float) or not abs(value) < 1e18:
        shown = reprlib.repr(value)
        raise ValueError(f"{where}: timestamp must be a number of milliseconds, got {shown}")
    return float(value)
