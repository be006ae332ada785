"""gpu_check without a GPU: arguments, rows, arithmetic, judgement, and what runs on a CPU."""

import csv
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import op, timing
from benchmarks.gpu.journal import (
    Case,
    Clock,
    DeviceLost,
    Journal,
    Selection,
    Wrong,
    run_cases,
    source,
)
from benchmarks.gpu.timing import Ceilings

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
SOURCE = {"device": "none", "date": "today"}
# 4 TB/s of copies and of reads, 800 TFLOP/s
CEILINGS = Ceilings(copy=3.9e12, read=4e12, matmul=8e14)


def journal_in(folder: Path, *columns: str) -> Journal:
    return Journal(folder / "part.csv", columns, SOURCE)


def rows_in(folder: Path) -> list[dict[str, str]]:
    with (folder / "part.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def failing(error: Exception) -> dict[str, Any]:
    raise error


def later() -> Clock:
    return Clock(time.time() + 600)


def test_all_parts_run_for_nine_minutes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    args = gpu_check.parse([])
    assert (args.parts, args.minutes, args.quick) == (list(gpu_check.PARTS), 9.0, False)
    assert args.out == ROOT / "benchmarks" / "results"


def test_a_quick_run_alone_is_two_parts_with_less_time() -> None:
    args = gpu_check.parse(["--quick"])
    assert (args.parts, args.minutes) == (["kernels", "parity"], 3.5)
    args = gpu_check.parse(["--quick", "op"])
    assert (args.parts, args.minutes) == (["op"], 9.0)


@pytest.mark.parametrize(
    ("revision", "device", "command", "goes_on"),
    [
        ("abc", "H100", "python benchmarks/gpu_check.py op", True),
        ("abc", "H100", "python benchmarks/gpu_check.py op --quick", False),
        ("abc", "H200", "python benchmarks/gpu_check.py op", False),
        ("abd", "H100", "python benchmarks/gpu_check.py op", False),
        ("abc-dirty", "H100", "python benchmarks/gpu_check.py op", False),
    ],
)
def test_a_part_goes_on_with_the_newest_csv_of_its_revision(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    revision: str,
    device: str,
    command: str,
    goes_on: bool,
) -> None:
    source = {"revision": revision, "device": device, "command": command}
    of_now = {"revision": revision if "dirty" in revision else "abc", "device": "H100"}
    monkeypatch.setattr(gpu_check, "source", lambda: {**of_now, "command": "now"})
    args = Namespace(out=tmp_path, quick=False)
    assert gpu_check.left_by_an_earlier_run("op", args) is None
    for name in ("gpu-op-1.csv", "gpu-op-2.csv", "gpu-kernels-3.csv"):
        journal = Journal(tmp_path / name, ("us",), source)
        journal.add("a case", {"us": 1})
        journal.add("a case that failed", {"us": 2}, "why")
    found = gpu_check.left_by_an_earlier_run("op", args)
    assert found == (tmp_path / "gpu-op-2.csv" if goes_on else None)
    journal = Journal(tmp_path / "gpu-op-2.csv", ("us",), source)
    assert journal.done() == {"a case", *([] if goes_on else ["a case that failed"])}
    journal.add("a case", {"us": 3})  # run again, as what another is held against
    assert [row["us"] for row in Journal(journal.path, ("us",), source).rows][-1] == "3"
    assert len(journal.rows) == (1 if goes_on else 2)


def test_arguments_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    args = gpu_check.parse(["op", "kernels", "op", "--quick", "--minutes", "2", "--cases", "a*"])
    assert (args.parts, args.out, args.cases) == (["op", "kernels"], tmp_path, ["a*"])
    assert gpu_check.parse(["engine-7b", "engine"]).parts == ["engine-7b", "engine-8b"]


@pytest.mark.parametrize("arguments", [["bogus"], ["--minutes", "0"], ["op", "-x"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        gpu_check.parse(arguments)
    assert refused.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    said = "gpu_check: needs a CUDA GPU; torch sees none\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


def test_every_part_names_its_columns_and_cases_once() -> None:
    for part in gpu_check.PARTS:
        module, _ = gpu_check.module_of(part)
        columns = ["case", "status", "failure", *module.COLUMNS, *source()]
        assert len(set(columns)) == len(columns)
    for module in (op, __import__("benchmarks.gpu.kernels", fromlist=["cases"])):
        names = [case.name for case in module.cases(quick=False)]
        assert len(set(names)) == len(names) > 10
        assert len(list(module.cases(quick=True))) < len(names)
    assert next(op.cases(quick=False)).name == "B=64 P=8192 S=512 32/8x128 stock"


def test_a_row_is_on_disk_as_soon_as_its_case_ended(tmp_path: Path) -> None:
    journal, seen = journal_in(tmp_path, "us"), []

    def look() -> dict[str, Any]:
        seen.append([row["case"] for row in rows_in(tmp_path)])
        return {"us": 5}

    assert run_cases([Case(name, look) for name in "abc"], journal, later()) == []
    assert seen == [[], ["a"], ["a", "b"]]
    assert (
        rows_in(tmp_path)[2] == {"case": "c", "status": "pass", "us": "5", "failure": ""} | SOURCE
    )


def test_a_failing_case_is_a_row_and_the_next_goes_on(tmp_path: Path) -> None:
    journal = journal_in(tmp_path, "us", "error_found")
    cases = [
        Case("raises", lambda: failing(ValueError("no such\nkernel"))),
        Case("wrong", lambda: failing(Wrong("off by 2", {"error_found": 2}))),
        Case("misspelt", lambda: {"uss": 1}),
        Case("good", lambda: {"us": 1}),
    ]
    run_cases(cases, journal, later(), answers=lambda: True)
    failures = {row["case"]: row["failure"] for row in rows_in(tmp_path)}
    assert failures["raises"] == "ValueError: no such kernel"
    assert failures["wrong"] == "Wrong: off by 2"
    assert "uss" in failures["misspelt"] and failures["good"] == ""
    assert rows_in(tmp_path)[1]["error_found"] == "2"
    assert journal.failed() == ["raises", "wrong", "misspelt"]


def test_cases_that_no_time_is_left_for_are_named(tmp_path: Path) -> None:
    cases = [Case("long", lambda: {}, seconds=60), Case("short", lambda: {}, seconds=1)]
    left_out = run_cases(cases, journal_in(tmp_path), Clock(time.time() + 20))
    assert left_out == ["long"] and [row["case"] for row in rows_in(tmp_path)] == ["short"]


def test_after_a_lost_device_another_process_runs_the_rest(tmp_path: Path) -> None:
    cases = [Case("kills", lambda: failing(RuntimeError("illegal"))), Case("rest", lambda: {})]
    with pytest.raises(DeviceLost, match="kills"):
        run_cases(cases, journal_in(tmp_path), later(), answers=lambda: False)
    again = journal_in(tmp_path)
    run_cases(cases, again, later())
    assert [row["status"] for row in rows_in(tmp_path)] == ["FAIL", "pass"]
    assert again.failed() == ["kills"]


def test_rows_name_the_command_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        "x",
        "op",
        "--csv",
        "/somewhere/a.csv",
        "--until",
        "1.5",
        "--report",
        "/somewhere/a.json",
        "--quick",
        "--cases",
        "B=1 *",
    ]
    monkeypatch.setattr(sys, "argv", given)
    command = "python benchmarks/gpu_check.py op --quick --cases 'B=1 *'"
    assert source()["command"] == command


def test_only_chosen_cases_run(tmp_path: Path) -> None:
    cases = [Case(name, lambda: {}) for name in ("plan 64", "plan 256", "fusion")]
    run_cases(cases, journal_in(tmp_path), later(), Selection(["plan*6"]))
    assert [row["case"] for row in rows_in(tmp_path)] == ["plan 256"]


@pytest.mark.parametrize("statuses", [(0,), (1,), (3, 0), (3, 3, 1)])
def test_a_part_that_lost_its_device_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...]
) -> None:
    script = tmp_path / "part.py"
    script.write_text(
        "import pathlib, sys\n"
        "log = pathlib.Path(sys.argv[sys.argv.index('--csv') + 1])\n"
        "log.open('a').write('x')\n"
        f"sys.exit({statuses}[len(log.read_text()) - 1])\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    args = Namespace(out=tmp_path, minutes=1, quick=False, cases=[], resume=False)
    trouble = gpu_check.drive("op", args)
    assert trouble[-1:] == (["ended before its last case"] if statuses[-1] else [])
    assert [len(log.read_text()) for log in tmp_path.glob("*.csv")] == [len(statuses)]


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "part.py"
    script.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    monkeypatch.setattr(gpu_check, "OVERTIME", 0.0)
    begun = time.monotonic()
    args = Namespace(out=tmp_path, minutes=0.01, quick=True, cases=["x"], resume=False)
    assert gpu_check.drive("op", args) == ["ended before its last case"]
    assert time.monotonic() - begun < 20


class Module:
    """A part of three cases; the last takes longer than there is."""

    COLUMNS = ("bar",)

    @staticmethod
    def cases(quick: bool) -> list[Case]:
        bars = {"good": "met: a", "slow": "met: a; MISSED: b"}
        found = [Case(name, lambda bar=bar: {"bar": bar}, 0) for name, bar in bars.items()]
        return [*found, Case("long", dict, 900)]


@pytest.mark.parametrize(
    ("chosen", "trouble"),
    [
        ("good", []),
        ("slow", ["missed: slow (met: a; MISSED: b)"]),
        ("long", ["left out: long"]),
        ("[gl]o*", ["left out: long"]),
        ("none", ["no case ran"]),
    ],
)
def test_a_missed_bar_and_a_case_left_out_do_not_pass_and_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
    chosen: str,
    trouble: list[str],
) -> None:
    def run_processes(part: str, args: Namespace, csv: Path, report: Path) -> int:
        inner = Namespace(csv=csv, until=time.time() + 60, report=report)
        inner.cases, inner.quick = args.cases, args.quick
        return gpu_check.run_part(part, inner)

    monkeypatch.setattr(gpu_check, "module_of", lambda part: (Module, ()))
    monkeypatch.setattr(gpu_check, "run_processes", run_processes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "source", lambda: SOURCE)
    status = gpu_check.main(["op", "--out", str(tmp_path), "--cases", chosen])
    last = capfd.readouterr().out.splitlines()[-1]
    assert status == bool(trouble)
    said = "NOT PASSED: " + "; ".join(f"op: {line}" for line in trouble)
    assert last.startswith(f"gpu_check: {said if trouble else 'all parts passed'}; ")


def test_the_last_line_names_what_a_part_that_was_ended_had_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(part: str, args: Namespace, csv: Path, report: Path) -> int:
        Journal(csv, ("bar",), SOURCE).add("slow", {"bar": "MISSED: b"})
        return 1

    monkeypatch.setattr(gpu_check, "run_processes", ended)
    found = gpu_check.drive("op", Namespace(out=tmp_path, resume=False))
    assert found == ["missed: slow (MISSED: b)", "ended before its last case"]


@pytest.mark.gpu
@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_a_quick_run_of_each_part_passes(part: str, tmp_path: Path) -> None:
    assert gpu_check.main([part, "--quick", "--out", str(tmp_path)]) == 0


@pytest.mark.gpu
def test_times_on_a_gpu_grow_with_the_work() -> None:
    watch = timing.Stopwatch(replays=5)
    small, large = (torch.empty(n << 20, device="cuda") for n in (16, 256))
    times = [watch.microseconds(x.zero_, flushed=True) for x in (small, large)]
    assert times[1] > 4 * times[0] > 0
