"""The demo without its servers: chats, log lines, tables, child processes."""

import csv
import io
import json
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import demo
from benchmarks.harness import chat, environment, latin_square, result_csv
from benchmarks.report import demo_tables
from vllm_relay.serving import commands, processes

HEALTHY_LOG = """\
(Worker pid=7) INFO 01-01 00:00:00 [metrics.py:9] 24 requests share 3,968 tokens in 1 group: 90 %
(Worker pid=7) INFO 01-01 00:00:01 [metrics.py:9] relay: steps=1 relayed=0 kv_bytes_not_read=0
(Worker pid=7) INFO 01-01 00:00:02 [metrics.py:9] relay: kv_bytes_not_read=789 steps=12 relayed=10
"""
PINNED = "system KV licence: 3,968 of 4,018 tokens pinned in 31 blocks"
WROTE = "wrote 1 system KV into the KV cache: 91.4 MB in 0.055 s, 1.66 GB/s"
SYSTEM_KV_LOG = f"""\
(EngineCore pid=6) INFO 01-01 00:00:00 [connector.py:9] relay: {PINNED}, from /tmp/licence.relay
(Worker pid=7) INFO 01-01 00:00:00 [writer.py:9] relay: {WROTE}, checksums included
{HEALTHY_LOG}"""
BENCH = {"median_ttft_ms": 1000.0, "median_tpot_ms": 20.0, "output_throughput": 300.0}


def answer(tokens: str, *logprobs: float, lead: float = 1.0) -> chat.ChatAnswer:
    return chat.ChatAnswer(tokens, tuple(tokens), logprobs, (lead,) * len(logprobs))


def served(label: str, *answers: chat.ChatAnswer, **changes: Any) -> demo_tables.Run:
    """What a server did that gave the same answers twice."""
    same = {"answers": list(answers), "again": list(answers), "first_ttft": 5.0, "bench": BENCH}
    return demo_tables.Run(label=label, **{**same, **changes})


def printed(show: Any, *shown: Any, width: int = 100) -> tuple[str, Any]:
    """What `show` prints into a terminal of that width, and what it returns."""
    console = Console(file=io.StringIO(), width=width)
    returned = show(console, *shown)
    return console.file.getvalue(), returned


def test_identical_answers_agree() -> None:
    first, second = answer("abc", -0.1, -0.2, -0.3), answer("abc", -0.1, -0.26, -0.3)
    found = chat.agreement([first], [second])
    assert (found.identical, found.partings) == (1, {})
    assert found.largest == pytest.approx(0.06)
    assert found.mean == pytest.approx(0.02)


def test_what_follows_a_parting_is_not_compared() -> None:
    first, second = answer("abc", -0.1, -9.0, -9.0, lead=0.5), answer("axc", -0.1, -0.1, -0.1)
    found = chat.agreement([answer("a", -0.1), first], [answer("a", -0.1), second])
    assert (found.identical, found.partings) == (1, {1: 1})
    assert found.largest == 0.5
    assert found.mean == pytest.approx(0.5 / 3)


def test_answers_that_part_at_once_are_far_apart() -> None:
    found = chat.agreement([answer("a", -0.1, lead=4.0)], [answer("b", -0.1)])
    assert found.mean == 4.0


def test_an_answer_that_ends_early_parts_there() -> None:
    long, short = answer("abc", -0.1, -0.2, -0.3, lead=0.25), answer("ab", -0.1, -0.2)
    assert chat.parting(long, short) == chat.parting(short, long) == 2
    assert chat.lead(long, short, 2) == chat.lead(short, long, 2) == 0.25


def test_empty_answers() -> None:
    assert chat.parting(answer(""), answer("")) is None
    assert chat.agreement([answer("")], [answer("")]).mean == 0.0


def test_counters_come_from_the_last_line_in_any_order() -> None:
    counters = demo.relay_counters(HEALTHY_LOG)
    assert counters == {"steps": 12, "relayed": 10, "kv_bytes_not_read": 789}
    assert demo.relay_counters("a server without relay: no counters\n") == {}


def test_sharing_line_is_found_without_the_log_prefix() -> None:
    assert demo.sharing_line(HEALTHY_LOG) == "24 requests share 3,968 tokens in 1 group: 90 %"
    assert demo.sharing_line("") is None


def test_system_kv_lines_say_what_was_pinned_and_how_fast_but_not_where_it_lay() -> None:
    assert demo.system_kv_lines(SYSTEM_KV_LOG) == (PINNED, WROTE)
    assert demo.system_kv_lines(HEALTHY_LOG) == ()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.00 TiB")],
)
def test_human_bytes(count: int, text: str) -> None:
    assert demo_tables.human_bytes(count) == text


def test_labels_are_unique() -> None:
    assert demo.labels(["CPU_ATTN", "relay"]) == ["stock", "relay"]
    assert demo.labels(["CPU_ATTN", "CPU_ATTN"]) == ["stock", "stock-2"]
    assert demo.labels(["RELAY", "Relay"]) == ["relay", "relay-2"]


def test_questions_differ_and_are_bounded() -> None:
    assert len(set(chat.questions(24))) == 24
    assert len(set(chat.questions(96))) == 96
    with pytest.raises(ValueError, match="--requests"):
        chat.questions(97)


@pytest.mark.parametrize("wrong", [["--requests", "0"], ["--prompt-tokens", "9000"]])
def test_options_out_of_range_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.parse(wrong)
    assert stopped.value.code == 2
    assert f"{wrong[0]} is {wrong[1]}" in capsys.readouterr().err


def test_quick_is_small() -> None:
    assert demo.parse(["--quick"]).prompt_tokens < demo.parse([]).prompt_tokens


def test_csv_rows_keep_the_load_apart_from_the_counters() -> None:
    stock = served("stock", answer("ab", -0.1, -0.2))
    relay = served("relay", answer("ab", -0.1, -0.4), counters={"requests": 99})
    rows = demo_tables.csv_rows([stock, relay], demo.parse(["--requests", "7"]))
    assert [row["requests"] for row in rows] == [7, 7]
    assert [row["mean_logprob_difference"] for row in rows] == ["0.000000", "0.100000"]
    assert rows[1]["relay_requests"] == 99


def test_csv_leaves_empty_what_was_not_measured() -> None:
    stock, kv = served("stock"), served("relay+kv", first_ttft=0.1, bench=None)
    rows = demo_tables.csv_rows([stock, kv], demo.parse([]))
    assert [row["backend"] for row in rows] == ["stock", "relay+kv"]
    assert [row["first_ttft_ms"] for row in rows] == ["5000.000", "100.000"]
    assert [row["ttft_median_ms"] for row in rows] == ["1000.000", ""]
    assert [row["tpot_median_ms"] for row in rows] == ["20.000", ""]
    assert [row["output_tokens_per_s"] for row in rows] == ["300.000", ""]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").strip("│\n").split("│")]


def test_speed_has_a_column_per_server_and_a_ratio_per_server_but_the_first() -> None:
    slow = BENCH | {"median_tpot_ms": 30.0, "output_throughput": 150.0}
    stock, relay = served("stock"), served("relay", bench=slow, counters={"kv_bytes_not_read": 512})
    kv = served("relay+kv", first_ttft=0.5, bench=None, counters={"kv_bytes_not_read": 7})
    shown, _ = printed(Console.print, demo_tables.speed_table([stock, relay, kv]))
    rows = {row[0]: row[1:] for row in map(cells, shown.splitlines())}
    assert rows[""][3:] == ["relay", "relay+kv"]
    assert rows["metric"] == ["stock", "relay", "relay+kv", "/ stock", "/ stock"]
    first = rows["TTFT of the first request after start"]
    assert first == ["5,000.0", "5,000.0", "500.0", "1.00 x", "0.10 x"]
    assert rows["TPOT, median (ms, lower is better)"] == ["20.0", "30.0", "-", "1.50 x", "-"]
    assert rows["throughput (tokens/s, higher is better)"][3:] == ["0.50 x", "-"]
    assert rows["KV bytes not read (chat and bench)"] == ["0 B", "512 B", "-", "", ""]


def test_numbers_fit_into_100_columns() -> None:
    large = {"median_ttft_ms": 123456.7, "median_tpot_ms": 12345.6, "output_throughput": 12345.6}
    more = {"first_ttft": 123.4567, "bench": large, "counters": {"kv_bytes_not_read": 1048000}}
    runs = [served(label, **more) for label in ("stock", "relay", "relay+kv")]
    shown, _ = printed(Console.print, demo_tables.speed_table(runs))
    assert max(map(len, shown.splitlines())) <= 100
    assert shown.count("123,456.7") == 6 and shown.count("1,023.4 KiB") == 3


def test_without_a_system_kv_there_are_two_servers_and_one_ratio() -> None:
    shown, _ = printed(Console.print, demo_tables.speed_table([served("stock"), served("relay")]))
    assert cells(shown.splitlines()[3]) == ["metric", "stock", "relay", "/ stock"]


@pytest.mark.parametrize(("bench", "there"), [(BENCH, "no gain there"), (None, "left out")])
def test_the_log_lines_of_a_system_kv_stand_under_the_numbers(bench: Any, there: str) -> None:
    kv = served("relay+kv", bench=bench, system_kv=(PINNED, WROTE))
    shown, _ = printed(demo_tables.show_numbers, [served("stock"), served("relay"), kv])
    lines = shown.splitlines()
    assert f"relay+kv: {PINNED}" in lines and f"relay+kv: {WROTE}" in lines
    assert any(line.startswith("relay+kv: its file") and line.endswith(there) for line in lines)
    assert not [line for line in lines if line.startswith(("stock:", "relay:"))]


@pytest.mark.parametrize("wrong", [None, 1, 2])
def test_every_server_must_agree_with_the_first(wrong: int | None) -> None:
    good, bad = answer("ab", -0.1, -0.2), answer("xy", -0.1, -0.2)
    labels = ("stock", "relay", "relay+kv")
    runs = [served(label, bad if i == wrong else good) for i, label in enumerate(labels)]
    shown, passed = printed(demo_tables.show_agreement, runs)
    assert passed == (wrong is None)
    verdicts = [line.split(" differs")[0] for line in shown.splitlines() if " differs from" in line]
    says = ["failed" if i == wrong else "passed" for i in (1, 2)]
    assert verdicts == [f"{says[0]}: relay", f"{says[1]}: relay+kv"]


@pytest.mark.parametrize(("logprob", "close"), [(-0.29, True), (-0.31, False)])
def test_a_server_may_be_twice_as_far_from_the_first_as_the_first_is_from_itself(
    logprob: float, close: bool
) -> None:
    stock = served("stock", answer("a", -0.1), again=[answer("a", -0.2)])
    _, passed = printed(demo_tables.show_agreement, [stock, served("relay", answer("a", logprob))])
    assert passed == close


def test_partings_count_questions_and_tokens_from_one() -> None:
    stock = served("stock", answer("ab", -0.1, -0.2), answer("ab", -0.1, -0.2, lead=0.5))
    relay = served("relay", answer("ab", -0.1, -0.2), answer("ax", -0.1, -0.2))
    shown, _ = printed(demo_tables.show_agreement, [stock, relay])
    assert "  2: 2 (0.500)" in shown.splitlines()


def test_answers_of_the_third_server_are_compared_with_the_second() -> None:
    stock = served("stock", answer("ab", -0.1, -0.2), answer("ab", -0.1, -0.2))
    relay = served("relay", answer("cd", -0.1, -0.2), answer("cd", -0.1, -0.2))
    kv = served("relay+kv", answer("cd", -0.1, -0.2), answer("ce", -0.1, -0.2))
    shown, _ = printed(demo_tables.show_answers, ["one?", "two?"], [stock, relay, kv])
    assert "relay+kv: 1 of 2 answers are the same as relay's, token for token" in shown


def record_servers(
    monkeypatch: pytest.MonkeyPatch, folder: Path, argv: list[str], bench_seconds: float = 1.0
) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """(backend, label) of the servers that the demo would start, and their options."""
    started: list[tuple[str, str]] = []
    options: list[dict[str, Any]] = []

    def start(backend: str, label: str, system: str, *rest: Any, **more: Any) -> demo_tables.Run:
        started.append((backend, label))
        options.append(more | {"system": system})
        return served(label, bench_seconds=bench_seconds)

    def build(model: Path, output: Path, given: list[str], **more: Any) -> Path:
        assert len(started) == 2  # it does not compute beside a server that is measured
        assert given[0] == "--system-prompt" and output.suffix == ".relay"
        return Path(given[1])

    monkeypatch.setattr(demo, "run_server", start)
    monkeypatch.setattr(demo, "build_system_kv", build)
    demo.run_all(demo.parse(argv), folder, Console(file=io.StringIO()))
    return started, options


def test_the_third_server_is_the_second_with_the_system_prompt_of_the_chats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started, options = record_servers(monkeypatch, tmp_path, ["--quick"])
    assert started == [("CPU_ATTN", "stock"), ("relay", "relay"), ("relay", "relay+kv")]
    assert [more.get("control", False) for more in options] == [True, False, False]
    assert [more.get("system_kv") is not None for more in options] == [False, False, True]
    assert options[2]["system_kv"].read_text() == options[0]["system"] == options[2]["system"]
    assert options[2]["bench"] is True


def test_a_long_bench_is_left_out_for_the_third_server_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, options = record_servers(monkeypatch, tmp_path, ["--quick"], bench_seconds=60.5)
    assert [more.get("bench", True) for more in options] == [True, True, False]


def test_no_system_kv_leaves_the_two_named_backends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    argv = ["--quick", "--no-system-kv", "--backends", "CPU_ATTN", "CPU_ATTN"]
    started, _ = record_servers(monkeypatch, tmp_path, argv)
    assert started == [("CPU_ATTN", "stock"), ("CPU_ATTN", "stock-2")]


def test_the_demo_sets_nothing_for_an_engine_but_the_size_of_its_kv_cache() -> None:
    assert demo.engine_env(demo.parse(["--kv-gib", "3"])) == {"VLLM_CPU_KVCACHE_SPACE": "3"}


@contextmanager
def streaming(contents: list[str], pause: float = 0.0) -> Iterator[tuple[Any, list[Any]]]:
    """A chat API that streams a role, waits, and streams `contents`; and the messages it got."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append(body["messages"])
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for i, content in enumerate(["", *contents]):
                if i == 1:
                    time.sleep(pause)
                delta = {"role": "assistant", "content": content}
                chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
                chunk |= {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *unused: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield Namespace(url=url, log=Path("relay.log")), got
        server.shutdown()


def test_the_first_token_is_the_first_content_not_the_role() -> None:
    with streaming(["Hel", "lo"], pause=0.3) as (server, got):
        seconds = chat.first_ttft(server, "the prompt", lambda doing: None)
    assert seconds >= 0.3
    roles = [[message["role"] for message in messages] for messages in got]
    assert roles == [["user"], ["system", "user"]]
    assert got[1][0]["content"] == "the prompt"


def test_an_empty_first_answer_is_no_measurement() -> None:
    with streaming([]) as (server, _), pytest.raises(RuntimeError, match="relay gave"):
        chat.first_ttft(server, "the prompt", lambda doing: None)


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    with pytest.raises(processes.ProcessDied, match=r"status 1:(.|\n)*missing\.txt"):
        commands.build_system_kv(tmp_path, tmp_path / "x.relay", ["--system-prompt", str(missing)])


def test_csv_carries_provenance_and_never_overwrites(tmp_path: Path) -> None:
    target = tmp_path / "new" / "demo.csv"
    rows = [{"backend": "stock"}, {"backend": "relay", "steps": 3}]
    written = {result_csv.write_csv(target, rows, {"device": "x, y"}) for _ in range(3)}
    assert len(written) == 3
    for path in written:
        with path.open(newline="") as file:
            assert list(csv.DictReader(file)) == [
                {"backend": "stock", "device": "x, y", "steps": ""},
                {"backend": "relay", "device": "x, y", "steps": "3"},
            ]
    with pytest.raises(ValueError, match="rows"):
        result_csv.write_csv(target, [], {})


def test_missing_model_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make model"):
        environment.model_path(tmp_path)


@pytest.mark.parametrize(
    ("cuda", "bf16", "dtype", "mode"),
    [
        (None, True, "auto", "compiled"),
        (None, False, "float32", "compiled, float32"),
        ("13.0", False, "auto", "compiled"),
    ],
)
def test_a_cpu_that_lacks_bf16_runs_models_in_float32(
    cuda: str | None, bf16: bool, dtype: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bf16)
    assert demo.engine_flags()[-2:] == ["--dtype", dtype]
    saved: dict[str, Any] = {}
    monkeypatch.setattr(latin_square, "save", lambda *_, **columns: saved.update(columns))
    latin_square.save_engines(Console(), "tree", [{}], eager=False)
    assert saved["mode"] == mode


def test_provenance_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [demo.__file__, "--save"])
    prov = result_csv.source()
    assert prov["command"] == "python benchmarks/demo.py --save"
    assert all(isinstance(value, str) and value for value in prov.values())


def test_a_process_that_ignores_sigint_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE", (0.2, 5.0))
    script = "trap '' INT; sleep 60 & echo ready; wait; sleep 60"
    child = processes.Process(["sh", "-c", script], tmp_path / "child.log", {})
    while "ready" not in child.text():
        assert child.poll() is None
    child.stop()
    assert child.poll() == -signal.SIGTERM
    assert not child.group_alive()


def test_a_dead_process_shows_the_end_of_its_log(tmp_path: Path) -> None:
    child = processes.Process(["sh", "-c", "echo why; exit 3"], tmp_path / "server.log", {})
    while child.poll() is None:
        pass
    child.stop()
    assert str(child.died()) == "server ended with status 3:\nwhy"


def test_the_newest_message_of_a_log_says_what_a_server_is_doing() -> None:
    log = "INFO 01-01 00:00:00 [core.py:99] Initializing\nINFO [loader.py:7] Loading x\nother\n"
    assert processes.last_message(log) == "Loading x"
    assert processes.last_message("") == "importing vLLM"
