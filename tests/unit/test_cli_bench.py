"""``vllm-relay bench``: what it refuses, and what it makes of measurements."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.engine.engine import SMOLLM2, environment
from vllm_relay.cli import app
from vllm_relay.cli.bench import HINTS
from vllm_relay.cli.engine import build_options
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving import agreement, comparison
from vllm_relay.serving.agreement import Distance, WrongAnswers, distance
from vllm_relay.serving.comparison import Load, interleaved, render
from vllm_relay.serving.gains import show, summary, sustained
from vllm_relay.serving.processes import (
    ProcessDied,
    flag_value,
    free_port,
    kept_logs,
)
from vllm_relay.serving.systems import SYSTEMS


def run(*arguments: Any, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_relay.cli", "bench", *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == status, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--attention-backend", "relay"), "--attention-backend is what is compared"),
        (("--attention_backend=relay",), "--attention-backend is what is compared"),
        (("--attention-config.backend", "relay"), "--attention-config.backend is what is"),
        (("--port", "8000"), "--port is set for each server"),
        (("--no-enable-prefix-caching",), "--no-enable-prefix-caching is set for each system"),
        (("--rate", "1", "--rate", "0"), "--rate is 0"),
        (("--bound", "0.1"), "--bound needs --rate"),
        (("--questions", "{empty}"), "empty.txt has no questions"),
        (("--questions", "{missing}"), "No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("You are a baker.")
    (tmp_path / "empty.txt").write_text("\n \n")
    names = {"empty": tmp_path / "empty.txt", "missing": tmp_path / "missing.txt"}
    given = [x.format(**names) for x in options]
    done = run("--model", SMOLLM2, "--system-prompt", tmp_path / "prompt.txt", *given, status=1)
    assert done.stderr.startswith("vllm-relay: ") and reason in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def row(system: str, rate: float, number: int, normalized: float) -> dict[str, Any]:
    return {
        "rate": rate,
        "round": number,
        "system": system,
        "tokens_per_s": 10 / normalized,
        "requests_per_s": 1 / normalized,
        "normalized_s": normalized,
        **dict.fromkeys(("ttft_p50_s", "ttft_p99_s"), 0.5),
        **dict.fromkeys(("tpot_p50_s", "tpot_p99_s"), 0.05),
        "logprob_rms": 0.02 if system == "relay" else 0.0,
    }


def test_gains_are_medians_of_pairs_of_the_same_round() -> None:
    # the machine is three times as slow in round 2, and that tells nothing about relay
    rows = [
        row(system, math.inf, number, seconds)
        for system, times in (("stock", (0.2, 0.6, 0.2)), ("relay", (0.1, 0.3, 0.05)))
        for number, seconds in enumerate(times, 1)
    ]
    stock, relay = summary(rows[::-1])
    assert (stock["system"], relay["system"]) == ("stock", "relay")
    assert relay["times_latency"] == 2.0 and relay["times_throughput"] == 2.0
    assert (relay["times_latency_min"], relay["times_latency_max"]) == (2.0, 4.0)
    assert stock["times_latency"] == 1.0


def test_the_sustained_rate_is_the_highest_that_holds_the_bound() -> None:
    rows = [
        row("relay", rate, number, seconds)
        for rate, times in ((1, (0.1, 0.1, 0.9)), (2, (0.1, 0.2, 0.2)), (4, (0.3, 0.3, 0.1)))
        for number, seconds in enumerate(times, 1)
    ]
    assert sustained(rows, 0.2) == {"relay": 2}
    assert sustained(rows, 0.3) == {"relay": 4}
    assert sustained(rows, 0.05) == {"relay": None}
    # a rate above one that fails sustains nothing, and all at once is no rate
    lucky = [row("relay", rate, 1, 0.1 if rate != 2 else 0.9) for rate in (1, 2, 4, math.inf)]
    assert sustained(lucky, 0.2) == {"relay": 1}


def test_nobody_is_always_first_or_after_the_same() -> None:
    for keys in ("ab", "abc", "abcd"):
        orders = [interleaved(list(keys), number) for number in range(2 * len(keys))]
        assert all(sorted(order) == list(keys) for order in orders)
        for place in range(len(keys)):
            assert sorted(order[place] for order in orders) == sorted(keys * 2)
        for key in keys:
            before = {order[order.index(key) - 1] for order in orders if order[0] != key}
            assert len(before) > 1 or len(keys) == 2
    orders = ["".join(interleaved(list("abcd"), number)) for number in range(4)]
    assert orders == ["abcd", "badc", "cdab", "dcba"]


def test_the_table_of_gains(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row(system, rate, 1, seconds)
        for rate in (math.inf, 2)
        for system, seconds in (("relay", 0.08), ("stock", 0.2))
    ]
    show(Console(width=100), "Gains", rows, 0.1)
    printed = capsys.readouterr().out
    lines = [[cell.strip() for cell in x.split("│")[1:-1]] for x in printed.splitlines()]
    cells = [line for line in lines if line]
    assert cells[0] == [
        "all at once",
        "vLLM",
        "50",
        "0.500 s",
        "50.0 ms",
        "0.2000",
        "1.00",
        "1.00 to 1.00",
    ]
    assert cells[1] == ["", "relay", "125", "0.500 s", "50.0 ms", "0.0800", "2.50", "2.50 to 2.50"]
    assert cells[2][0] == "2" and len(cells) == 4
    assert printed.splitlines()[-2:] == [
        "within 0.1 s per token: vLLM: none of the rates",
        "within 0.1 s per token: relay: at least 2 requests/s, the highest tried",
    ]
    assert "differ from vLLM's by 0.020 nats at most" in printed


def test_distance_counts_up_to_where_answers_part() -> None:
    first = [[("a", -1.0, 2.0), ("b", -2.0, 0.4)], [("c", -1.0, 3.0)]]
    assert distance(first, first) == Distance(0, 0)
    # the second tokens part, by half of 0.4 and 0.2; what comes after it is of another text
    found = distance(first, [[("a", -1.3, 2.0), ("x", -2.0, 0.2)], [("c", -0.6, 3.0)]])
    assert found.rms == pytest.approx(math.sqrt((0.09 + 0.09 + 0.16) / 3))
    assert found.worst == pytest.approx(0.4)
    assert found.parted == 1 and found.lead == pytest.approx(0.3)
    # a tie at once is no distance
    assert distance([[("a", -0.7, 0.01)]], [[("b", -0.7, 0.01)]]).agrees


def test_one_wrong_answer_of_many_is_seen() -> None:
    right = [[("a", -0.1, 3.0)] * 16] * 32
    for wrong in ([("x", -0.1, 3.0)] * 16, [("a", -0.9, 3.0)] * 16):
        found = distance([*right[1:], wrong], right)
        assert not found.agrees and "in one answer by" in str(found)
        assert found.worst > 0.5
    # most part at once, and for no close call
    assert not distance([[("x", -0.1, 3.0)] * 16] * 31 + right[:1], right).agrees


def test_servers_that_answer_otherwise_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    right = [[("a", -0.1, 3.0)] * 4] * 3
    answers = {"stock": right, "relay": right}
    monkeypatch.setattr(agreement, "greedy", lambda server, prompts: answers[server])
    servers: Any = {key: key for key in answers}
    assert agreement.check(servers, ["x"] * 3, print)["relay"].rms == 0
    answers["relay"] = [*right[1:], [("x", -0.1, 3.0)] * 4]
    with pytest.raises(WrongAnswers, match=r"relay does not answer .*no speed is reported"):
        agreement.check(servers, ["x"] * 3, print)


def test_values_of_a_command_line() -> None:
    flags = ["--max_model_len=5", "--tokenizer", "a", "--tokenizer=b", "--revision"]
    assert flag_value(flags, "max-model-len") == "5" and flag_value(flags, "tokenizer") == "b"
    assert flag_value(flags, "revision") is None and flag_value(flags, "seed") is None


def test_flags_of_the_systems() -> None:
    files = [Path("a.relay"), Path("b.relay")]
    assert SYSTEMS["stock-no-caching"].flags(files) == ["--no-enable-prefix-caching"]
    assert SYSTEMS["stock"].flags(files) == ["--enable-prefix-caching"]
    assert "a.relay" not in SYSTEMS["relay"].flags(files)
    flags = SYSTEMS["relay-system-kv"].flags(files)
    assert flags[1:3] == ["--attention-backend", "relay"]
    assert flags.count("--additional-config.relay.system_kv+") == 2 and flags[-1] == "b.relay"


@pytest.mark.parametrize(
    ("gpu", "given", "share"),
    [
        (False, [], "0.16"),
        (True, [], "0.3"),
        (True, ["--gpu-memory-utilization", "0.2"], "0.2"),
        (True, ["--gpu_memory_utilization=0.2"], "0.2"),
    ],
)
def test_servers_share_the_memory(
    gpu: bool, given: list[str], share: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Started(Exception):
        pass

    def start(model: Path, flags: list[str], log: Path, **_: Any) -> None:
        raise Started(flags)

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    memory = SimpleNamespace(total=100, available=60)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(comparison, "serving", start)
    with pytest.raises(Started) as started:
        comparison.compare(
            tmp_path, ["stock", "relay", "relay-system-kv"], given, [], 1, tmp_path, checked=[]
        )
    assert flag_value(started.value.args[0], "gpu-memory-utilization") == share


def test_who_cannot_keep_up_is_not_asked_for_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(model: Path, flags: list[str], log: Path, **_: Any) -> Any:
        server = SimpleNamespace(key=log.stem, text=lambda: "")
        return nullcontext(server)

    def measure(server: Any, client: Any, load: Load, seed: int, report: Any) -> dict[str, float]:
        slow = {"stock-no-caching": 0.5, "stock": 0.3, "relay": 0.2}[server.key]
        return {"completed": 2, "normalized_s": slow}

    monkeypatch.setattr(comparison, "serving", start)
    monkeypatch.setattr(comparison, "measure", measure)
    monkeypatch.setattr(
        comparison, "check", lambda servers, *_: dict.fromkeys(servers, Distance(0, 0))
    )
    loads = [lambda _, rate=rate: Load(rate, 2, 2) for rate in (math.inf, 1, 2)]
    keys = ["stock-no-caching", "stock", "relay"]
    rows = comparison.compare(tmp_path, keys, [], loads, 2, tmp_path, checked=[], give_up=0.25)
    measured = {key: [row["rate"] for row in rows if row["system"] == key] for key in keys}
    # vLLM itself is what the others are compared with
    every = [math.inf, 1, 2] * 2
    assert measured == {"stock-no-caching": [math.inf, 1] * 2, "stock": every, "relay": every}
    assert all(row["requests"] == 2 for row in rows)


def bench_with_rounds(
    completed: int, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str
) -> Any:
    """Result of a `bench` of three rounds that is stopped after so many of them."""

    def compare(*_: Any, after_round: Any, **__: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        after_round(0, rows)
        for number in range(1, 4):
            rows.append(row("stock", math.inf, number, 0.2))
            if number > completed:
                raise KeyboardInterrupt
            rows.append(row("relay", math.inf, number, 0.1))
            after_round(number, rows)
        return rows

    monkeypatch.setattr(comparison, "compare", compare)
    prompt = folder / "prompt.txt"
    prompt.write_text("You are a baker.")
    command = ["bench", "--model", str(SMOLLM2), "--system-prompt", str(prompt), "--no-system-kv"]
    return CliRunner().invoke(app, [*command, *options])


def test_a_bench_says_its_plan_and_shows_the_first_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = bench_with_rounds(3, monkeypatch, tmp_path)
    assert done.exit_code == 0, done.stderr
    plan = "2 servers (vLLM, relay), 3 rounds of 1 load: 192 requests of 64 output tokens"
    assert plan in done.stderr.splitlines()[0]
    assert "Round 1 of 3" in done.stderr and "Round 2" not in done.stderr
    assert "for the others" in done.stderr


def test_a_stopped_bench_keeps_its_whole_rounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = bench_with_rounds(2, monkeypatch, tmp_path, "--json")
    assert done.exit_code == 130 and "stopped in round 3 of 3" in done.stderr
    shown = json.loads(done.stdout)
    assert [x["round"] for x in shown["rows"]] == [1, 1, 2, 2]
    assert [gain["rounds"] for gain in shown["gains"]] == [2, 2]


def test_a_bench_stopped_in_its_first_round_has_nothing_to_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = bench_with_rounds(0, monkeypatch, tmp_path)
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "vllm-relay: stopped"


def test_prompts_are_rendered_as_the_server_would() -> None:
    from transformers import AutoTokenizer

    (prompt,) = render(AutoTokenizer.from_pretrained(SMOLLM2), "Be brief.", ["Why?"])
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (
            "x\nValueError: a: has 5 tokens, less than one KV block of 128\ny",
            "--no-system-kv leaves",
        ),
        (
            "ERROR 1 [core.py:1] ValueError: no room for the KV cache\n  raise RuntimeError(\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "relay ended with status 1: ValueError: no room for the KV cache; logs: ",
        ),
        ("Killed", "relay ended with status 1: Killed; logs: "),
    ],
)
def test_a_server_that_dies_leaves_its_logs_and_a_reason(told: str, reason: str) -> None:
    with (
        pytest.raises(RuntimeError, match=re.escape(reason)) as raised,
        kept_logs("bench-", HINTS) as folder,
    ):
        (folder / "relay.log").write_text(told)
        raise ProcessDied(f"relay ended with status 1:\n{told}")
    assert (folder / "relay.log").read_text() == told and str(folder) in str(raised.value)
    shutil.rmtree(folder)


def test_no_port_is_told_twice() -> None:
    assert len({free_port() for _ in range(50)}) == 50


def test_told_to_end_it_stops_what_it_started() -> None:
    stopped = []
    with pytest.raises(SystemExit) as raised, ended_in_order():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            stopped.append("servers")
    assert stopped and raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_logs_of_what_went_well_are_not_left() -> None:
    with kept_logs("bench-", HINTS) as folder:
        pass
    assert not folder.exists()
    with pytest.raises(ValueError), kept_logs("bench-", HINTS) as folder:
        raise ValueError("bad input")
    assert not folder.exists()


def test_a_builds_options_are_those_of_the_engine() -> None:
    given = ["--enforce-eager", "--api-key", "k", "--max_model_len", "1024", "--allowed_origins"]
    dropped = ("--api-key", "k", "--allowed_origins", "[]", "--disable-uvicorn-access-log")
    given += ["[]", "--disable-uvicorn-access-log", "--max-num-seqs=4", "--chat-template=t.jinja"]
    given += ["--additional-config.relay.max_levels", "1", "-tp", "2", "--seed", "-1"]
    kept = [x for x in given if x.partition("=")[0] not in dropped]
    assert len(kept) == 11
    assert build_options("bench", given) == kept
    assert build_options("bench", []) == []
