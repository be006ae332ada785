"""The pure parts of the demo; no server is started."""

import csv
import signal
import sys
from pathlib import Path

import pytest

from benchmarks import chat, common, demo

HEALTHY_LOG = """\
(Worker pid=7) INFO 01-01 00:00:00 [metrics.py:9] 24 requests share 3,968 tokens in 1 group: 90 %
(Worker pid=7) INFO 01-01 00:00:01 [metrics.py:9] relay: steps=1 relayed=0 kv_bytes_not_read=0
(Worker pid=7) INFO 01-01 00:00:02 [metrics.py:9] relay: kv_bytes_not_read=789 steps=12 relayed=10
"""


def answer(tokens: str, *logprobs: float, lead: float = 1.0) -> chat.Answer:
    return chat.Answer(tokens, tuple(tokens), logprobs, (lead,) * len(logprobs))


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


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.00 TiB")],
)
def test_human_bytes(count: int, text: str) -> None:
    assert demo.human_bytes(count) == text


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
    bench = {"median_ttft_ms": 1.0, "median_tpot_ms": 2.0, "output_throughput": 3.0}
    first, other = [answer("ab", -0.1, -0.2)], [answer("ab", -0.1, -0.4)]
    stock = demo.Run("stock", first, first, bench, {}, None)
    relay = demo.Run("relay", other, other, bench, {"requests": 99}, None)
    rows = demo.csv_rows([stock, relay], demo.parse(["--requests", "7"]))
    assert [row["requests"] for row in rows] == [7, 7]
    assert [row["mean_logprob_difference"] for row in rows] == ["0.000000", "0.100000"]
    assert rows[1]["relay_requests"] == 99


def test_csv_carries_provenance_and_never_overwrites(tmp_path: Path) -> None:
    target = tmp_path / "new" / "demo.csv"
    rows = [{"backend": "stock"}, {"backend": "relay", "steps": 3}]
    written = {common.write_csv(target, rows, {"device": "x, y"}) for _ in range(3)}
    assert len(written) == 3
    for path in written:
        with path.open(newline="") as file:
            assert list(csv.DictReader(file)) == [
                {"backend": "stock", "device": "x, y", "steps": ""},
                {"backend": "relay", "device": "x, y", "steps": "3"},
            ]
    with pytest.raises(ValueError, match="rows"):
        common.write_csv(target, [], {})


def test_missing_model_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make model"):
        common.model_path(tmp_path)


def test_provenance_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [demo.__file__, "--save"])
    prov = common.provenance()
    assert prov["command"] == "python benchmarks/demo.py --save"
    assert all(isinstance(value, str) and value for value in prov.values())


def test_a_process_that_ignores_sigint_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "GRACE", (0.2, 5.0))
    script = "trap '' INT; sleep 60 & echo ready; wait; sleep 60"
    child = common.Process(["sh", "-c", script], tmp_path / "child.log", {})
    while "ready" not in child.text():
        assert child.poll() is None
    child.stop()
    assert child.poll() == -signal.SIGTERM
    assert not child.group_alive()


def test_a_dead_process_shows_the_end_of_its_log(tmp_path: Path) -> None:
    child = common.Process(["sh", "-c", "echo why; exit 3"], tmp_path / "server.log", {})
    while child.poll() is None:
        pass
    child.stop()
    assert str(child.died()) == "server ended with status 3:\nwhy"


def test_phase_is_the_youngest_known_line(tmp_path: Path) -> None:
    log = "Resolved architecture: X\nStarting to load model x...\nsomething else\n"
    assert common.phase(log) == "loading the weights"
    assert common.phase("") == "importing vLLM"
