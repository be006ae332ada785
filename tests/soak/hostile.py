"""Hostile inputs: 100,000 cases for each parser.

The parsers are those of system-KV files, measured costs, request logs and settings, and the Python
entry points of the CPU kernels. System-KV files are changed by their structure and sealed again, so
that the changes get past the seal; what is admitted is written by the real `Writer` into a KV cache
between guard pages. The kernels' arguments and results end at guard pages. The cases of a chunk run
in a child process.

A case must be accepted or be refused with one line, as a ValueError (a SystemKVError for files). A
failure is any other exception, a message of several lines, a case that takes half a minute, and a
signal, which ends the child; the next case goes on in another child.

    python -m tests.soak --part hostile
"""

import faulthandler
import mmap
import os
import signal
import struct
import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.soak import hostile_files, hostile_kernels, hostile_text

# Each makes, in a folder of its own, a case: a random number generator -> "accepted".
PARSERS: dict[str, Callable[[Path], Callable[[Random], bool]]] = {
    "system-KV files": hostile_files.make_case,
    "costs": hostile_text.make_costs_case,
    "traces": hostile_text.make_trace_case,
    "settings": hostile_text.make_settings_case,
    "kernels": hostile_kernels.make_case,
}
CHUNKS = 50
CASES_PER_CHUNK = 10_000
_SECONDS_PER_CASE = 30
_MOST_SHOWN = 5


def run_chunk(chunk: int) -> dict[str, Any]:
    """The soak's row of one chunk."""
    parser = list(PARSERS)[chunk % len(PARSERS)]
    first = chunk // len(PARSERS) * CASES_PER_CHUNK
    return run(parser, range(first, first + CASES_PER_CHUNK))


class _Counts:
    """The case in progress and counts, in memory that children share."""

    def __init__(self) -> None:
        self._memory, self._form = mmap.mmap(-1, mmap.PAGESIZE), struct.Struct("<4q")

    @property
    def values(self) -> tuple[int, ...]:
        """The next case; accepted, refused, failed ones."""
        return self._form.unpack_from(self._memory)

    @values.setter
    def values(self, values: tuple[int, ...]) -> None:
        self._form.pack_into(self._memory, 0, *values)


def run(
    parser: str, cases: range, fault: AbstractContextManager[Any] | None = None
) -> dict[str, Any]:
    """Counts of these cases, by their seeds; ``fault``: planted in the children."""
    counts = _Counts()
    counts.values = (cases.start, 0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        while left := range(counts.values[0], cases.stop):
            child = os.fork()
            if child == 0:
                with fault or nullcontext():
                    _run_cases(parser, left, counts, Path(folder))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status:
                at, accepted, refused, failures = counts.values
                counts.values = (at + 1, accepted, refused, failures + 1)
                _show(f"{parser}, case {at}: the process ended with {status}", failures)
    _, accepted, refused, failures = counts.values
    return {
        "parser": parser,
        "cases": len(cases),
        "accepted": accepted,
        "refused": refused,
        "failures": failures,
    }


def _run_cases(parser: str, cases: range, counts: _Counts, folder: Path) -> None:
    """In the child: all cases, then the end of the process."""
    faulthandler.disable()
    for ends in (signal.SIGALRM, signal.SIGSEGV, signal.SIGBUS):
        signal.signal(ends, signal.SIG_DFL)  # at once, without a stack trace
    torch.set_num_threads(1)  # pools of threads do not survive a fork
    try:
        case = PARSERS[parser](folder)
        for seed in cases:
            signal.alarm(_SECONDS_PER_CASE)
            _, *done = counts.values
            try:
                done[0 if case(Random(seed)) else 1] += 1
            except BaseException:
                _show(f"{parser}, case {seed}: {traceback.format_exc()}", done[2])
                done[2] += 1
            counts.values = (seed + 1, *done)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _show(text: str, shown: int) -> None:
    if shown < _MOST_SHOWN:
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
