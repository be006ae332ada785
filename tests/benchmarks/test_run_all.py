"""`make bench`: what it runs, and what becomes of a benchmark that fails; the trace report."""

import argparse
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run_all
from benchmarks.harness.result_csv import revision, write_csv
from tests.engine.engine import ROOT, environment
from vllm_relay.serving.provenance import provenance


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Those that would have been run where nothing was measured yet; bench_tree.py fails."""
    found: list[list[str]] = []
    monkeypatch.setattr(run_all, "RESULTS", tmp_path)

    def status_of(command: list[str]) -> int:
        found.append(command)
        return int("bench_tree.py" in command[1])

    monkeypatch.setattr(run_all, "status_of", status_of)
    return found


@pytest.mark.parametrize(("grid", "count"), [([], 9), (["--full"], 18)])
def test_every_benchmark_runs_and_is_kept_whatever_fails(
    grid: list[str], count: int, commands: list[list[str]], monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["run_all.py", *grid])
    assert run_all.main() == 1
    *benchmarks, report = commands
    assert len(benchmarks) == count and Path(report[1]).name == "write_report.py"
    for _, script, *options in benchmarks:
        assert Path(script).is_file() and options[-1] == "--save"
    assert "failed: tree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "flags", "count"),
    [({}, [], 0), ({}, ["--again"], 1), ({"cores": "99"}, [], 1), ({"revision": "older"}, [], 1)],
)
def test_the_whole_grid_goes_on_where_it_was_ended(
    changed: dict[str, str],
    flags: list[str],
    count: int,
    commands: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = next(run for run in run_all.RUNS if run.name == "needles")
    command = f"python benchmarks/suites/bench_needles.py {run.full} --save"
    row = {**provenance(), "command": command, "revision": "now", **changed}
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    write_csv(tmp_path / "needles.csv", [{"system": "relay"}], row)
    monkeypatch.setattr(run_all, "same_code", lambda then: then == "now")
    monkeypatch.setattr("sys.argv", ["run_all.py", "--full", "--only", "needles", *flags])
    assert run_all.main() == 0
    assert len(commands) == count + 1  # and the report


def test_code_is_compared_with_that_of_a_revision() -> None:
    assert run_all.same_code("HEAD") == ("dirty" not in revision(*run_all.CODE))
    for unknown in ("0" * 40, "none", f"{revision()}-dirty"):
        assert not run_all.same_code(unknown)


@pytest.mark.parametrize("run", run_all.RUNS, ids=lambda run: run.name)
def test_its_options_are_those_of_the_benchmark(run: run_all.Run, monkeypatch: Any) -> None:
    """Without measuring anything: each script gets as far as its parser."""
    script = import_module(f"benchmarks.suites.bench_{run.name}")
    parse = argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        pass

    def only_parse(self: argparse.ArgumentParser, arguments: Any = None) -> Any:
        parse(self, arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    for options in {run.small, run.full} - {None}:
        with pytest.raises(Parsed):
            script.main([*str(options).split(), "--save"])
    with pytest.raises(SystemExit):
        script.main(["--no-such-option"])


def test_one_benchmark_alone(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run_all.py", "--only", "decode"])
    assert run_all.main() == 0
    assert [Path(command[1]).name for command in commands] == ["bench_decode.py", "write_report.py"]


def test_the_trace_report_tells_what_is_saved(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    # eight requests at once, with a document of 4,096 tokens before their own 512
    requests = [
        {"timestamp": 0, "input_length": 9 * 512, "output_length": 2, "hash_ids": [*range(8), i]}
        for i in range(100, 108)
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    command = [sys.executable, str(ROOT / "benchmarks" / "suites" / "bench_trace.py"), str(trace)]
    command += ["--concurrency", "8", "--objective", "reads"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # the document is read once for eight: seven eighths of eight ninths
    assert "reads, 8 at once: 77.8% of KV reads saved" in done.stdout
