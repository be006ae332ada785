"""The benchmarks that compare systems, each once, tiny, on real engines that are started once."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.config import ModelConfig

from benchmarks.harness import engines, latin_square, result_csv
from benchmarks.harness.engines import Engine, Limits
from benchmarks.report import comparison_figures, write_report
from benchmarks.suites import (
    bench_attention,
    bench_completions,
    bench_decode,
    bench_fewshot,
    bench_needles,
    bench_order,
    bench_prepacking,
    bench_throughput,
    bench_tree,
)
from tests.benchmarks.reports import assert_checked, assert_reported, read
from tests.engine.engine import SMOLLM2
from vllm_relay.serving.systems import FOUR, System

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PREFIX = list(range(1000, 1300))


@pytest.fixture(scope="module")
def started(model: Path) -> Iterator[dict[str, Engine]]:
    """Four systems and their ceiling, which relay whatever saves a read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        keys = (*FOUR, "no-attention", "relay-1-level")
        with engines.engines(
            model,
            keys,
            Limits(1024, 8, kv_blocks=80, eager=True),
            prefixes=[PREFIX],
            settings={"min_saved_tokens": 0},
        ) as found:
            yield found


@pytest.fixture
def shared(started: dict[str, Engine], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts measure with these engines."""

    @contextmanager
    def found(model: Any, keys: Any, *_: Any, **__: Any) -> Iterator[dict[str, Engine]]:
        # "relay" finds as many levels as there are: here two
        yield {key: started["relay" if key == "relay-2-levels" else key] for key in keys}

    for module in (latin_square, bench_decode, bench_order, bench_prepacking):
        monkeypatch.setattr(module, "engines", found)
    for module in (bench_tree, bench_order):
        monkeypatch.setattr(module, "write_random_model", lambda folder, *heads: folder)
    monkeypatch.setattr(bench_decode, "write_random_model", lambda folder, *heads: model)


@pytest.mark.parametrize(
    ("script", "options", "count"),
    [
        (bench_throughput, "--prefix 64 256 --mix 8 4 --requests 4 --repeats 1", 4 * 4),
        (bench_fewshot, "--examples 0 3 --subjects 2 --questions 2 --steps 3 --repeats 1", 2 * 4),
        (bench_needles, "--document 400 --facts 3 --questions 1 2 --steps 4 --repeats 1", 2 * 5),
        (
            bench_completions,
            "--samples 1 8 --batch 8 --prompts 1 --prompt-tokens 300 --tokens 3 --repeats 1 "
            "--without stock-no-caching",
            3 * 2,
        ),
        (
            bench_tree,
            "--examples 512 --problem 0 256 --problems 2 --samples 4 --steps 3 --repeats 1",
            2 * 4,
        ),
    ],
    ids=["throughput", "fewshot", "needles", "completions", "tree"],
)
def test_it_measures_every_system_and_the_report_shows_it(
    script: Any, options: str, count: int, results: Path, shared: None
) -> None:
    assert script.main([*options.split(), "--save"]) == 0
    path, rows = read(results, script.__name__.rpartition("bench_")[2])
    assert len(rows) == count
    assert all(float(row["seconds"]) > 0 and float(row["tokens"]) > 0 for row in rows)
    assert_checked(rows)
    report = assert_reported(results, path)
    findings = report.partition("## How it was measured")[0]
    assert re.search(r"relay.*: [\d.]+ times vLLM's speed in the median case, from", findings)
    scored = "Right answers where a system is farthest from vLLM" in findings
    assert scored == (script in (bench_fewshot, bench_needles))


def test_decode_is_measured_and_the_report_names_what_gains_little(
    results: Path, shared: None
) -> None:
    options = "--shared 256 128 0 --also 1 256 8 --also 2 128 300 --own 8 --requests 4 --steps 4"
    assert bench_decode.main([*options.split(), "--repeats", "2", "--prefill", "--save"]) == 0
    path, rows = read(results, "decode")
    assert [(row["requests"], row["shared_tokens"], row["own_tokens"]) for row in rows] == [
        *(("4", shared, "8") for shared in ("256", "128", "0")),
        *(("1", "256", "8"), ("2", "128", "300")),
    ]
    for row in rows:
        assert float(row["no_attention_tok_s"]) > 0 and float(row["ratio"]) > 0
        assert float(row["stock_prefill_s"]) > 0 and float(row["prefill_time_ratio"]) > 0
        assert 0 <= float(row["logprob_rms"]) < 0.1
    report = assert_reported(results, path)
    for kind in ("One request", "Short prefix", "Contexts longer than", "Nothing shared"):
        assert f"### {kind}" in report


def test_models_that_differ_in_heads_are_measured_side_by_side(
    results: Path, shared: None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, ...]] = []

    def write(folder: Path, *heads: int) -> Path:
        written.append(heads)
        return model

    monkeypatch.setattr(bench_decode, "write_random_model", write)
    options = "--shared 256 --own 8 --requests 4 --steps 4 --repeats 1 --also-heads 8 1 64 --save"
    assert bench_decode.main(options.split()) == 0
    assert written == [(16, 16, 128), (8, 1, 64)]
    path, rows = read(results, "decode-heads")
    assert len(rows) == 2
    assert "## Decode steps of MHA, GQA and MQA" in assert_reported(results, path)


def test_batches_of_several_sizes_are_measured(results: Path, shared: None) -> None:
    options = "--shared 256 --own 8 --requests 2 4 --steps 4 --repeats 1 --save"
    assert bench_decode.main(options.split()) == 0
    path, rows = read(results, "decode-requests")
    assert [row["requests"] for row in rows] == ["2", "4"]
    assert "## Decode steps by the size of the batch" in assert_reported(results, path)


def test_right_answers_are_told_where_they_differ_most() -> None:
    def row(questions: int, system: str, right: int) -> dict[str, Any]:
        return {"questions": questions, "system": system, "right": right, "asked": questions}

    rows = [row(100, "stock", 50), row(100, "relay", 48), row(16, "stock", 8), row(16, "relay", 6)]
    # 2 of 16 is farther than 2 of 100
    assert "6 of 16 beside 8; the binomial error of that number is 2.0" in (
        comparison_figures.accuracy(rows)
    )
    assert comparison_figures.accuracy(rows[:1]) == ""
    unscored = [{**x, "right": ""} for x in rows]
    assert comparison_figures.accuracy(unscored) == ""


@pytest.mark.parametrize(
    "options", ["--requests 2 4 --shared 0 64", "--also-heads 8 1 64 --also 1 64 8"]
)
def test_workloads_that_no_figure_shows_are_refused(options: str) -> None:
    with pytest.raises(SystemExit):
        bench_decode.main(options.split())


def test_attention_is_measured_beside_the_theory(results: Path) -> None:
    options = "--threads 1 --rounds 2 --heads 4 2 64 --steps 128 256 --save --contexts"
    assert bench_attention.main([*options.split(), "32 x 64"]) == 0
    path, rows = read(results, "attention")
    steps = [row for row in rows if row["part"] == "step"]
    assert [(row["prefix_tokens"], row["caches"]) for row in steps] == [
        (prefix, caches) for prefix in ("128", "256") for caches in ("flushed", "warm")
    ]
    # (s + c + 2) / (s / b + c + 7) of 128 and 128 tokens, 32 requests
    assert float(steps[0]["eq_10"]) == round((128 + 128 + 2) / (128 / 32 + 128 + 7), 3)
    assert all(float(row["ms"]) > 0 and float(row["times_vllms_error"]) < 3 for row in rows)
    assert_reported(results, path)
    for figure in ("theory", "bounds"):
        assert path.with_name(f"{path.stem}-{figure}.png").stat().st_size > 10_000


def test_packed_prompts_are_measured_and_answered_as_one_by_one(
    results: Path, shared: None, model: Path
) -> None:
    options = ["--prompts", "4", "--median", "60", "--longest", "200", "--repeats", "1", "--save"]
    assert bench_prepacking.main([*options, "--model", str(model)]) == 0
    path, rows = read(results, "prepacking")
    packed, alone, padded = rows
    assert [row["way"] for row in rows] == list(bench_prepacking.WAYS)
    assert packed["tokens_computed"] == alone["tokens_computed"]
    assert int(padded["tokens_computed"]) == 4 * int(packed["longest_tokens"])
    for row in rows:
        assert 0 < float(row["ttft_mean_s"]) <= float(row["seconds"])
    assert_reported(results, path)


def test_orders_are_measured_and_answers_are_those_of_the_prompts(
    results: Path, shared: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--tenants 4 --each 3 --prefix 128 --own 8 --generate 3 --at-once 2 --repeats 1"
    assert bench_order.main([*options.split(), "--save"]) == 0
    _, rows = read(results, "order")
    assert [(row["system"], row["order"]) for row in rows] == [
        (system, order) for system in ("stock", "relay") for order in ("random", "ordered")
    ]
    assert all(row["prompt_tokens"] == str(12 * 136) for row in rows)
    assert all(float(row["seconds"]) > 0 for row in rows)
    # Answers in the order in which they came are not those to the prompts.
    monkeypatch.setattr(bench_order, "sorted", lambda pairs, key: list(pairs), raising=False)
    assert bench_order.main(options.split()) == 1
    assert "answers differ, no speed is reported" in capsys.readouterr().out


def test_wrong_answers_give_no_speed(
    started: dict[str, Engine], results: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """An engine that skips attention, in the place of relay."""

    @contextmanager
    def found(*_: Any, **__: Any) -> Iterator[dict[str, Engine]]:
        yield {"stock": started["stock"], "relay": started["no-attention"]}

    for module in (latin_square, bench_decode):
        monkeypatch.setattr(module, "engines", found)
    options = "--prefix 64 --requests 2 --repeats 1 --save"
    assert bench_throughput.main(options.split()) == 1
    monkeypatch.setattr(bench_decode, "KEYS", ("stock", "relay"))
    options = "--shared 256 --own 8 --requests 2 --steps 3 --repeats 1 --save --model"
    assert bench_decode.main([*options.split(), str(SMOLLM2)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("no speed is reported") == 2
    assert "tokens/s" not in printed and "Decode throughput" not in printed
    assert not list(results.glob("*.csv"))


def test_a_kernel_that_is_wrong_gives_no_speed(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    row = {"part": "prefix", "way": "ours", "times_vllms_error": 3.5}
    monkeypatch.setattr(bench_attention, "engine", lambda heads: nullcontext())
    monkeypatch.setattr(bench_attention, "measure", lambda *_: [row])
    assert bench_attention.main(["--threads", "1", "--save"]) == 1
    printed = capsys.readouterr().out
    assert "no speed is reported" in printed and "Attention of one layer" not in printed
    assert not list(results.glob("*.csv"))


def test_the_report_says_how_far_two_runs_of_one_command_are_apart(tmp_path: Path) -> None:
    prov = {**result_csv.source(), "command": "python benchmarks/suites/bench_tree.py"}
    for times in (2.0, 2.2, 3.0):
        ratio = {"times_as_fast_as_stock": times, "times_min": times - 0.2, "times_max": times}
        of = {"examples_tokens": 8, "problem_tokens": 4, "problems": 2, "samples": 2}
        measured = {"seconds": 1.0, "seconds_min": 1.0, "seconds_max": 1.0, "tok_s": 2.0}
        row = {**of, "system": "relay-2-levels", **measured, **ratio, "logprob_rms": ""}
        row["steps_relayed"] = 1
        result_csv.write_csv(tmp_path / "tree.csv", [row], prov)
    report = assert_reported(tmp_path)
    # 3.0 against 2.2: apart by more than either's rounds
    assert "In 0 of 1 speed-ups the range of the newest run alone overlaps" in report
    assert "36.4% apart" in report
    # shown is what all found
    assert "| 3.00 | 1.80 to 3.00 |" in report
    third = max(tmp_path.glob("tree-*.csv"), key=lambda x: x.stem)
    third.unlink()
    report = assert_reported(tmp_path)
    assert "In 1 of 1 speed-ups" in report and "| 2.20 | 1.80 to 2.20 |" in report


def test_an_engine_forgets_its_prefix_cache_but_not_a_file(started: dict[str, Engine]) -> None:
    prompt = [*PREFIX, 5]
    for key, kept in (
        ("stock-no-caching", (0, 0)),
        ("stock", (256, 0)),
        ("relay-system-kv", (256, 256)),
    ):
        engine = started[key]
        engine.forget()
        engine.finish([prompt], [1])
        again = engine.finish([prompt], [1]).cached
        engine.forget()
        assert (again, engine.finish([prompt], [1]).cached) == kept, key


def test_a_short_case_gets_more_rounds(
    started: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def make_round(number: int) -> latin_square.Round:
        asked.append(number)
        return [[number + 3]] * 2, [1] * 2

    case = latin_square.Workload({"requests": 2}, make_round)
    both = {key: started[key] for key in ("stock-no-caching", "stock")}
    for min_seconds, rounds in ((0, 2), (1e-9, 2), (1e9, latin_square.MOST_ROUNDS)):
        asked.clear()
        rows = latin_square.compare(both, case, 2, min_seconds).rows()
        assert [row["rounds"] for row in rows] == [rounds] * 2
        assert asked == list(range(rounds + 1))  # and one that warms up
    finish = Engine.finish
    monkeypatch.setattr(Engine, "finish", lambda *given: replace(finish(*given), seconds=0.25))
    assert latin_square.compare(both, case, 2, 2.0).rows()[0]["rounds"] == 4


def test_engines_that_are_up_are_closed_when_another_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []

    class Started:
        def __init__(self, model: Path, system: System, *_: Any) -> None:
            if system.relay:
                raise ValueError(f"no {system.label}")
            self.system = system

        def close(self) -> None:
            closed.append(self.system.label)

    monkeypatch.setattr(engines, "Engine", Started)
    before = dict(os.environ)
    keys = ("stock", "no-attention", "relay")
    with (
        pytest.raises(ValueError, match="no relay"),
        engines.engines(SMOLLM2, keys, Limits(8, 1, kv_blocks=8, eager=True)),
    ):
        pass
    assert sorted(closed) == ["no attention at all", "vLLM"] and dict(os.environ) == before


def test_requests_that_do_not_fit_are_refused(started: dict[str, Engine]) -> None:
    with pytest.raises(RuntimeError, match=r"4 of 8 tokens: max_model_len is less than 1,028"):
        started["stock"].finish([[5] * 1020], [8])


def test_a_check_that_sees_nothing_is_no_check(started: dict[str, Engine]) -> None:
    """Attention in the place of the engine that skips it."""
    case = latin_square.Workload({"requests": 1}, lambda number: ([[number + 3, 7, 9]], [4]))
    both = {"stock": started["stock"], "no-attention": started["stock-no-caching"]}
    (said,) = latin_square.compare(both, case, 1).wrong()
    assert said.startswith("no attention at all") and "does not detect" in said
    assert (
        latin_square.compare({**both, "no-attention": started["no-attention"]}, case, 1).wrong()
        == []
    )


def test_words_that_were_planted_are_recognised() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    given = ["--document", "600", "--facts", "4", "--questions", "3", "5"]
    prefix, cases = bench_needles.make_workloads(tokenizer, bench_needles.parse(given))
    prompts, lengths = cases[1].make_round(1)
    text = tokenizer.decode(prompts[0])
    asked = re.findall(r"The secret word of (\w+) is (\w+)", text)
    assert len(asked) == 4 and len(prompts) == len(lengths) == 5
    assert all(prompt[: len(prefix)] == prefix for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 5  # one fact is asked for twice
    words = dict(asked)

    def answer(prompt: list[int], word: str) -> Any:
        assert tokenizer.decode(prompt).endswith(" is")
        return [(token, 0.0, 0.0) for token in tokenizer(f" {word}. And")["input_ids"]]

    names = [tokenizer.decode(prompt).split()[-2] for prompt in prompts]
    answers = [answer(p, words[name]) for p, name in zip(prompts, names, strict=True)]
    assert cases[1].right is not None and cases[1].right(1, answers) == 5
    assert cases[1].right(1, [answer(prompts[0], "no word of ours"), *answers[1:]]) == 4
    # too short for a fact
    with pytest.raises(SystemExit, match="hold no fact"):
        bench_needles.make_workloads(tokenizer, bench_needles.parse(["--document", "8"]))


def test_a_model_too_short_for_a_document_gets_more_positions(tmp_path: Path) -> None:
    assert bench_needles.stretched(SMOLLM2, 8192, tmp_path) == SMOLLM2
    found = bench_needles.stretched(SMOLLM2, 20_000, tmp_path)
    # without one, vLLM takes the length that the positions allow
    assert ModelConfig(str(SMOLLM2)).max_model_len == 8192
    assert ModelConfig(str(found)).max_model_len == 3 * 8192
    assert (found / "model.safetensors").samefile(SMOLLM2 / "model.safetensors")


def test_two_runs_are_pooled_by_case() -> None:
    newest = [{"system": x, "times_min": 2.0, "times_max": 3.0, "ms_min": 1.0} for x in "ab"]
    before = [{"system": "b", "times_min": 1.0, "times_max": 4.0, "ms_min": ""}]
    assert write_report.pooled(newest, before) == [
        newest[0], {"system": "b", "times_min": 1.0, "times_max": 4.0, "ms_min": 1.0}
    ]  # fmt: skip
    # single rounds are kept apart
    rounds = write_report.pooled([{"round": 1, "system": "a"}], [{"round": 1, "system": "a"}])
    assert [row["round"] for row in rounds] == [(0, 1), (1, 1)]
