"""The log of ``vllm serve --enable-log-requests`` at level DEBUG, as rows of a request log.

Two lines of vLLM's ``RequestLogger`` tell of a request: "Request ID details: …" has the token ids
of its prompt, "Received request ID: …" its parameters.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

# Before the message: "(APIServer pid=7) DEBUG 11-26 22:33:57 [request_logger.py:61] ".
_PREFIX = r"(?:INFO|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]*\] "
_DETAILS = re.compile(
    _PREFIX + r"Request (\S+) details: prompt: .*, prompt_token_ids: (\[[\d, ]*\]|None), "
)
_RECEIVED = re.compile(_PREFIX + r"Received request (\S+): params: (?:.*?max_tokens=(\d+))?")


def rows(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and row of each request: ``prompt_token_ids``, ``max_tokens``, ``timestamp``.

    Raises:
        ValueError: no request, or none with the token ids of its prompt, and what would log them.
    """
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    received = False
    for number, line in enumerate(lines, 1):
        text = line.decode(errors="replace")
        if match := _DETAILS.search(text):
            at, name, ids = match.groups()
            if ids != "None":
                tokens = [int(x) for x in re.findall(r"\d+", ids)]
                row = {"prompt_token_ids": tokens, "timestamp": _milliseconds(at)}
                found[name] = number, row
        elif match := _RECEIVED.search(text):
            received = True
            _, name, most = match.groups()
            if name in found and most is not None:
                found[name][1]["max_tokens"] = int(most)
    if not found:
        raise ValueError(
            "has requests without their prompts: vLLM logs them with VLLM_LOGGING_LEVEL=DEBUG"
            if received
            else "holds neither JSON lines nor the requests of vllm serve --enable-log-requests"
        )
    yield from found.values()


def _milliseconds(at: str) -> float:
    """Time of a line; the log has no year, and a leap year has all days."""
    return datetime.strptime(f"2000-{at}", "%Y-%m-%d %H:%M:%S").timestamp() * 1e3
