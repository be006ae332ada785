"""Request logs, JSON lines or a server's: requests, and the KV blocks that their prompts fill."""

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictFloat, StrictInt

from vllm_relay.explain import server_log
from vllm_relay.sharing.order import order
from vllm_relay.validation import Count, checked, parse_json

# Text of a prompt, or its chat messages, to token ids.
Tokenize = Callable[[str | list[Any]], list[int]]

# Output tokens of rows that do not say how many there were.
DEFAULT_OUTPUT = 256
# Tokens per block where nobody says: rows of hashes are read as Mooncake's, tokens as vLLM's.
HASHED_BLOCK, TOKEN_BLOCK = 512, 16
_MOST = 2**31  # lengths are int32 from here on
_Milliseconds = Annotated[StrictFloat, Field(gt=-1e18, lt=1e18)]
# A line of a program's log: letters, or "(" of vLLM's process names.
_SERVER_LINE = re.compile(rb"[A-Z(]")
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


@dataclass(frozen=True, kw_only=True)
class _Hashed:
    """A row of hashes, as far as it is read."""

    hash_ids: list[StrictInt]
    input_length: Count
    output_length: Count


@dataclass(frozen=True)
class Trace:
    """Requests in the order of the file, and tokens per block."""

    requests: list[Request]
    block_tokens: int

    def reordered(self) -> "Trace":
        """All requests at once, in the order of `vllm_relay.order`."""
        at = order([request.blocks for request in self.requests])
        return Trace([replace(self.requests[i], timestamp=0.0) for i in at], self.block_tokens)


def read_trace(
    path: Path, block_tokens: int | None = None, tokenize: Tokenize | None = None
) -> Trace:
    """Read a log; each row says what its prompt was in one of these ways.

    ``{"hash_ids": [...], "input_length": n, "output_length": n}``: one id per block of the prompt,
    as in Mooncake's traces; the last block may be partly filled. Or, with the length of the answer
    as ``output_length`` or ``max_tokens`` (else `DEFAULT_OUTPUT`), ``{"prompt_token_ids": [...]}``,
    ``{"prompt": "text" or token ids}`` or ``{"messages": [...]}``. ``timestamp`` is optional. A
    line of OpenAI's batch files has such a row as its ``body``. A file that begins with a
    capital letter or "(" is read as the log of a server, see `server_log`.

    Args:
        block_tokens: tokens per block; 512 where None for rows of hashes and 16 for others.
        tokenize: for text and messages.

    Raises:
        ValueError: naming the file, the line and what is wrong there.
        OSError: the file cannot be read.
    """
    rows: list[tuple[int, str, dict[str, Any]]]
    with path.open("rb") as file:
        lines = file.readlines()
    first = next((line.lstrip() for line in lines if line.strip()), None)
    if first is None:
        raise ValueError(f"{path}: is empty")
    if _SERVER_LINE.match(first):
        try:
            rows = [(line, "prompt_token_ids", row) for line, row in server_log.rows(lines)]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    else:
        rows = [
            (line, *_row(content, f"{path}:{line}: "))
            for line, content in enumerate(lines, 1)
            if content.strip()
        ]
    hashed = {kind == "hash_ids" for _, kind, _ in rows}
    if block_tokens is None:
        if len(hashed) > 1:
            raise ValueError(
                f"{path}: some rows hold hash_ids, others tokens: say how many tokens a block has"
            )
        block_tokens = HASHED_BLOCK if True in hashed else TOKEN_BLOCK
    paths, requests = _Paths(), []
    for line, kind, row in rows:
        where, text = f"{path}:{line}: ", None
        if kind == "hash_ids":
            length, output, blocks = _hashed(row, where, block_tokens)
        else:
            text, prompt = _prompt(row[kind], kind, where, tokenize)
            length, output = len(prompt), _answer(row, where)
            full = range(0, length // block_tokens * block_tokens, block_tokens)
            blocks = [tuple(prompt[start : start + block_tokens]) for start in full]
        if length + output >= _MOST:
            raise ValueError(f"{where}{length} + {output} tokens are too many for one request")
        timestamp = 0.0
        if row.get("timestamp") is not None:
            timestamp = checked(_Milliseconds, row["timestamp"], f"{where}timestamp")
        requests.append(Request(timestamp, length, output, paths(blocks), line, text))
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
    row = parse_json(content, where)
    if not isinstance(row, dict):
        raise ValueError(f"{where}must be an object, one per line")
    if isinstance(row.get("body"), dict):  # a line of a batch file
        row = row["body"]
    kind = next((kind for kind in _KINDS if kind in row), None)
    if kind is None:
        raise ValueError(f"{where}has none of {', '.join(_KINDS)}")
    return kind, row


def _hashed(row: dict[str, Any], where: str, block_tokens: int) -> tuple[int, int, list[Hashable]]:
    """Lengths of prompt and answer, and the ids of full blocks."""
    given = checked(_Hashed, row, where)
    tokens, ids = given.input_length, given.hash_ids
    full, most = tokens // block_tokens, -(-tokens // block_tokens)
    if not full <= len(ids) <= most:
        raise ValueError(
            f"{where}{len(ids)} hash_ids for {tokens} tokens of input; blocks of {block_tokens} "
            f"tokens make {most}"
        )
    return tokens, given.output_length, list(ids[:full])


def _prompt(
    prompt: Any, kind: str, where: str, tokenize: Tokenize | None
) -> tuple[str | None, list[int]]:
    """A prompt's text for people, where the row has it, and its token ids."""
    text = prompt if isinstance(prompt, str) else None
    if kind == "messages" and text is None:
        messages = checked(list[dict[str, Any]], prompt, f"{where}messages")
        text = " ".join(m["content"] for m in messages if isinstance(m.get("content"), str))
    if text is not None:
        if tokenize is None:
            raise ValueError(
                f"{where}{kind} needs a tokenizer: give --model or --tokenizer, a folder"
            )
        try:
            prompt = tokenize(prompt)
        except Exception as error:  # of somebody else's template
            raise ValueError(f"{where}the tokenizer refuses {kind}: {error}") from error
    return text, checked(list[Count], prompt, f"{where}{kind}")


def _answer(row: dict[str, Any], where: str) -> int:
    for name in ("output_length", "max_completion_tokens", "max_tokens"):
        if row.get(name) is not None:
            return checked(Count, row[name], f"{where}{name}")
    return DEFAULT_OUTPUT
