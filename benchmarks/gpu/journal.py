"""Result CSV of a part, a row per finished case, and the clock that ends the part in time."""

import csv
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import result_csv
from benchmarks.harness.environment import ROOT
from vllm_relay.serving.provenance import version

PASS, FAIL = "pass", "FAIL"
# Characters of an exception kept in a row.
_ERROR = 240

Row = dict[str, Any]


class DeviceLost(RuntimeError):
    """A CUDA error that leaves this process without a device; another process may go on."""


def _asked(arguments: list[str]) -> list[str]:
    """Arguments as a user gives them: without those that gpu_check adds for its own processes."""
    internal = ("--csv", "--until", "--report")
    pairs = zip(["", *arguments], arguments, strict=False)
    return [a for before, a in pairs if a not in internal and before not in internal]


def source() -> dict[str, str]:
    """Provenance columns of a part; without a GPU the device columns say "none"."""
    gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if gpu else ()
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return result_csv.source() | {
        "device": torch.cuda.get_device_name() if gpu else "none",
        "capability": ".".join(map(str, capability)) or "none",
        "driver": (result_csv.first_line(*driver) if gpu else "") or "none",
        "cuda": torch.version.cuda or "none",
        "triton": version("triton"),
        "flashinfer": version("flashinfer-python"),
        "command": shlex.join(["python", "benchmarks/gpu_check.py", *_asked(sys.argv[1:])]),
    }


@dataclass
class Clock:
    """The end of a part, in `time.time` seconds, so that child processes can share it."""

    until: float

    def left(self) -> float:
        """Seconds left."""
        return self.until - time.time()


class Journal:
    """A CSV that is complete after every row: appended, flushed, synced.

    Args:
        path: made with a header where it does not exist, else continued.
        columns: those of the part, without ``case``, ``status``, ``failure`` and provenance.
    """

    def __init__(self, path: Path, columns: Iterable[str], source: dict[str, str]) -> None:
        self.path = path
        self._columns = ["case", "status", *columns, "failure", *source]
        self._source = source
        self.rows: list[Row] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(self._columns)

    def _append(self, values: list[Any]) -> None:
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(values)
            file.flush()
            os.fsync(file.fileno())

    def keep(self, rows: list[Row]) -> None:
        """Replacement of all rows by these; the file is never half written."""
        self.rows = rows
        draft = self.path.with_suffix(".draft")
        with draft.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self._columns)
            writer.writerows([row.get(column, "") for column in self._columns] for row in rows)
        draft.replace(self.path)

    def done(self) -> set[str]:
        """Names of the cases that have a row."""
        return {row["case"] for row in self.rows}

    def find(self, case: str) -> Row | None:
        """The row of a case that is done."""
        return next((row for row in self.rows if row["case"] == case), None)

    def failed(self) -> list[str]:
        return [row["case"] for row in self.rows if row["status"] != PASS]

    def missed(self) -> list[str]:
        """Cases that passed, and the bar that they missed."""
        return [
            f"{row['case']} ({row['bar']})"
            for row in self.rows
            if row["status"] == PASS and "MISSED" in str(row.get("bar", ""))
        ]

    def add(self, case: str, row: Row, failure: str = "") -> None:
        """Write one row and print it.

        Args:
            failure: why the case failed; "" where it passed.

        Raises:
            KeyError: `row` has a column that the file has not.
        """
        status = FAIL if failure else PASS
        full = {**self._source, **row, "case": case, "status": status, "failure": failure}
        unknown = sorted(set(full) - set(self._columns))
        if unknown:
            raise KeyError(f"no such column: {', '.join(unknown)}")
        if self.find(case):  # of an earlier run, which this one repeats
            self.keep([row for row in self.rows if row["case"] != case])
        self.rows.append(full)
        self._append([full.get(column, "") for column in self._columns])
        shown = " ".join(f"{name}={value}" for name, value in row.items() if value != "")
        print(f"{status.upper()} {case}: {failure + ' ' if failure else ''}{shown}", flush=True)


@dataclass(frozen=True)
class Case:
    """One row to be.

    Attributes:
        run: makes the row; an exception is the failure. seconds: what it may take; a case is not
            started with less time left.
    """

    name: str
    run: Callable[[], Row]
    seconds: float = 20.0


class Wrong(AssertionError):
    """A case ran and its result is wrong. The row holds what is known; no speed belongs in it."""

    def __init__(self, message: str, row: Row | None = None) -> None:
        super().__init__(message)
        self.row = row or {}


def describe(error: BaseException) -> str:
    """Type and message in one short line, without the place of this repository."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line.replace(f"{ROOT}{os.sep}", "")[:_ERROR]


def _device_answers() -> bool:
    """True if the device still works; a sticky CUDA error fails every later call."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


@dataclass
class Selection:
    """Which cases to run: shell patterns; none means all."""

    patterns: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> bool:
        return not self.patterns or any(fnmatch(name, p) for p in self.patterns)


def run_cases(
    cases: Iterable[Case],
    journal: Journal,
    clock: Clock,
    chosen: Callable[[str], bool] = lambda name: True,
    answers: Callable[[], bool] = _device_answers,
) -> list[str]:
    """Run the cases that have no row yet; a failing one is a FAIL row and the next goes on.

    Returns:
        names of the cases that the time did not reach.

    Raises:
        DeviceLost: after a failure the device answers no more. The row is written.
    """
    left_out = []
    for case in _open(cases, journal, chosen):
        if clock.left() < case.seconds:
            left_out.append(case.name)
            continue
        try:
            journal.add(case.name, case.run())
        except Exception as error:
            if not isinstance(error, Wrong):
                traceback.print_exc(limit=-4)
            journal.add(case.name, getattr(error, "row", {}), describe(error))
            if not answers():
                raise DeviceLost(case.name) from error
    return left_out


def _open(cases: Iterable[Case], journal: Journal, chosen: Callable[[str], bool]) -> Iterator[Case]:
    for case in cases:
        if chosen(case.name) and case.name not in journal.done():
            yield case
