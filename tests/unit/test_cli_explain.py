"""``vllm-relay explain``: what it prints, draws and refuses."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.unit.sharing.traces import conversations, row, tree, write
from vllm_relay.cli import app
from vllm_relay.sharing import KernelCosts
from vllm_relay.sharing.cost_store import Constants, cpu_name, find_costs, save

ROOT = Path(__file__).parents[2]
KEYS = [
    "requests",
    "steps",
    "kv_tokens_stock",
    "kv_tokens_relay",
    "kv_tokens_once",
    "saved",
    "predicted_speedup",
    "levels_used",
]


def cli(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments: str | Path) -> str:
    """The one line with which it ends; nothing is left behind."""
    before = sorted(Path().rglob("*"))
    result = cli(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert sorted(Path().rglob("*")) == before
    return line.removeprefix("vllm-relay: ")


def data(*arguments: str | Path) -> Any:
    result = cli(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with logs; costs of this machine, measured long ago."""
    kernel = KernelCosts(call=1e-6, token=1e-12, first=1e-11, read=1e-10, far=0.0, pair=1e-13)
    mine = Constants(
        device=cpu_name(),
        threads=1,
        heads=32,
        kv_heads=8,
        head_size=128,
        dtype="bfloat16",
        cache=1 << 20,
        stock=kernel,
        context=kernel,
        system=kernel,
        packed=kernel,
        fusion=0.0,
        step=0.0,
        level=0.0,
        copy=0.0,
    )
    save([mine], tmp_path / "devices.json")
    monkeypatch.setenv("VLLM_RELAY_DEVICES", str(tmp_path / "devices.json"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    rows = conversations(random.Random(3), 60, 512)
    for at, entry in enumerate(rows):
        entry["timestamp"] = 1000 * at
    write(Path("trace.jsonl"), rows)
    write(Path("tree.jsonl"), tree([1, 4, 32], [512, 256, 32], 32, output=3))
    return tmp_path


# JSON


def test_json_has_the_keys_of_the_public_surface_first() -> None:
    found = data("trace.jsonl", "--concurrency", "8", "--block-tokens", "512")
    assert list(found)[: len(KEYS)] == KEYS
    assert found["requests"] == 60 and found["concurrency"] == 8
    assert found["saved"] == 1 - found["kv_tokens_relay"] / found["kv_tokens_stock"]
    assert found["kv_tokens_once"] <= found["kv_tokens_relay"] < found["kv_tokens_stock"]
    assert sum(found["reasons"].values()) == found["kv_tokens_stock"]
    assert found["predicted_speedup"] > 1
    assert found["block_tokens"] == 512 and "shared" not in found["costs"]["source"]


def test_a_tree_is_read_once_with_all_levels_and_more_often_with_one() -> None:
    options = ("tree.jsonl", "--block-tokens", "32", "--concurrency", "32", "--objective", "reads")
    every, one = data(*options), data(*options, "--max-levels", "1")
    once = 512 + 4 * 256 + 32 * 32
    # each of the 3 steps, and the tokens that were generated before it
    assert every["kv_tokens_relay"] == every["kv_tokens_once"] == 3 * once + 32 * (0 + 1 + 2)
    assert (every["levels_used"], one["levels_used"]) == (2, 1)
    assert one["kv_tokens_relay"] > every["kv_tokens_relay"]
    assert data(*options, "--max-levels", "all") == every
    assert data(*options, "--max-levels", "2")["kv_tokens_relay"] == every["kv_tokens_relay"]


def test_several_concurrencies_make_a_list() -> None:
    found = data("trace.jsonl", "--concurrency", "2", "--concurrency", "8")
    assert [entry["concurrency"] for entry in found] == [2, 8]
    assert found[0]["steps"] > found[1]["steps"]
    assert data("trace.jsonl", "--concurrency", "8") == found[1]


def test_requests_in_another_order_share_more() -> None:
    rows = tree([4, 32], [256, 32], 32, output=3)
    write(Path("ordered.jsonl"), rows)
    write(Path("mixed.jsonl"), random.Random(1).sample(rows, len(rows)))
    options = ("--block-tokens", "32", "--concurrency", "8", "--objective", "reads")
    ordered, mixed = (data(f"{x}.jsonl", *options, "--reorder") for x in ("ordered", "mixed"))
    best = ordered["saved"]
    assert mixed["saved"] < best == mixed["reordered"]["saved"] == ordered["reordered"]["saved"]
    shown = cli("mixed.jsonl", *options, "--reorder").stdout
    assert re.search(rf"reordered: KV reads saved +{100 * best:.1f} %", shown)
    fast = mixed["reordered"]["times_as_fast"]
    assert fast > 1 == ordered["reordered"]["times_as_fast"]
    assert re.search(rf"attention, to given order +{fast:.2f} x as fast", shown)
    assert "reordered" not in cli("mixed.jsonl", *options).stdout


def test_costs_decide() -> None:
    slow = Path("devices.json").read_text().replace('"call": 1e-06', '"call": 0.1')
    options = ("trace.jsonl", "--concurrency", "8")
    assert data(*options)["levels_used"] > 0
    Path("devices.json").write_text(slow)
    found = data(*options)
    assert (found["levels_used"], found["saved"], found["predicted_speedup"]) == (0, 0, 1)
    assert found["kv_tokens_once"] < found["kv_tokens_relay"]
    found = data(*options, "--objective", "reads")
    assert found["saved"] > 0 and found["predicted_speedup"] < 1


def test_groups_have_to_pay_by_more_than_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("trace.jsonl", "--concurrency", "8")
    assert data(*options)["levels_used"] > 0
    speedup = data(*options, "--objective", "reads")["predicted_speedup"]
    doubtful = replace(find_costs(32, 8, 128), margin=100.0)
    monkeypatch.setattr("vllm_relay.sharing.cost_store.find_costs", lambda *args, **more: doubtful)
    assert data(*options)["levels_used"] == 0
    # predictions are without it
    assert data(*options, "--objective", "reads")["predicted_speedup"] == speedup


def test_heads_come_from_a_model() -> None:
    Path("model").mkdir()
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    for content in (config, {"text_config": config}):
        Path("model/config.json").write_text(json.dumps(content))
        costs = data("trace.jsonl", "--model", "model")["costs"]
        assert [costs[name] for name in ("heads", "kv_heads", "head_size")] == [9, 3, 64]
    given = ("--heads", "9", "--kv-heads", "3", "--head-size", "64")
    assert data("trace.jsonl", *given)["costs"]["head_size"] == 64


@pytest.mark.parametrize(
    ("of_model", "options", "used"),
    [
        ("float16", (), "float16"),
        ("float32", (), "bfloat16"),  # as vLLM's --dtype auto
        ("bfloat16", ("--dtype", "float32"), "float32"),
    ],
)
def test_the_dtype_is_that_of_vllm(of_model: str, options: tuple[str, ...], used: str) -> None:
    Path("model").mkdir()
    config = {"num_attention_heads": 9, "hidden_size": 576, "torch_dtype": of_model}
    for content in (config, {"text_config": config}):
        Path("model/config.json").write_text(json.dumps(content))
        assert data("trace.jsonl", "--model", "model", *options)["costs"]["dtype"] == used


# For people


def test_tables_fit_a_terminal_and_say_who_shares_what_and_why_not() -> None:
    result = cli("trace.jsonl", "--concurrency", "8", "--concurrency", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    shown = result.stdout
    assert all(len(line) <= 80 for line in shown.splitlines())
    for part in (
        "trace.jsonl: 60 requests, ",
        "512 tokens per block",
        "chosen for the least time, all levels",
        cpu_name()[:20],
        "KV reads saved",
        "no group pays",
        "Who shares what, 8 at once",
        "from token",
        "Who shares what, 1 at once\n  nothing: no two requests that run at once have a full block",
    ):
        assert part in shown


def test_what_does_not_pay_is_said() -> None:
    slow = Path("devices.json").read_text().replace('"call": 1e-06', '"call": 0.1')
    Path("devices.json").write_text(slow)
    assert "nothing that pays: " in cli("trace.jsonl").stdout
    write(Path("silent.jsonl"), [row(512, 0, [1])])
    assert "nothing: no request generates a token" in cli("silent.jsonl").stdout


def test_a_prompt_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm_relay.cli.explain._tokenize", lambda folder: lambda text: [ord(x) for x in text]
    )
    rows = [{"prompt": "[red]You are\nhelpful. " * 4 + name, "max_tokens": 2} for name in "ab"]
    write(Path("prompts.jsonl"), rows)
    shown = cli("prompts.jsonl", "--objective", "reads").stdout
    assert "line 1: [red]You a" in shown and "16 tokens per block" in shown
    assert re.search("tokens +from token +level +requests +steps +saved +first request", shown)


# Plots


@pytest.mark.parametrize("more", [(), ("--concurrency", "2")])
@pytest.mark.parametrize("name", ["trace.jsonl", "tree.jsonl"])
def test_a_plot_is_a_png_and_takes_the_place_of_an_older_one(
    name: str, more: tuple[str, ...]
) -> None:
    pytest.importorskip("matplotlib")
    Path("plot.png").write_text("older")
    before = sorted(Path().iterdir())
    block = "512" if name == "trace.jsonl" else "32"
    options = (name, "--block-tokens", block, "--concurrency", "8", *more)
    assert cli(*options, "--plot", "plot.png").exit_code == 0
    assert Path("plot.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(Path().iterdir()) == before


def test_a_page_has_the_tables_and_the_figure_and_loads_nothing() -> None:
    pytest.importorskip("matplotlib")
    write(Path("a<b>{c}.jsonl"), [row(8, 4, [1, 2]), row(8, 4, [1, 3])])
    done = cli("a<b>{c}.jsonl", "--block-tokens", "4", "--html", "page.html")
    assert done.exit_code == 0 and "KV reads saved" in done.stdout
    page = Path("page.html").read_text()
    assert "<title>vllm-relay explain a&lt;b&gt;{c}.jsonl</title>" in page
    assert "KV reads saved" in page and 'src="data:image/png;base64,iVBOR' in page
    assert not re.search(r"https?://|<script|<b>{c}", page)


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_read() -> None:
    pytest.importorskip("matplotlib")
    Path("folder").mkdir()
    assert (
        refused("nope.jsonl", "--plot", "no/plot.png") == "no/plot.png: No such file or directory"
    )
    assert refused("nope.jsonl", "--plot", "folder") == "folder: is not a file"
    assert refused("nope.jsonl", "--plot", "/dev/null") == "/dev/null: is not a file"


def test_an_older_plot_stays_where_there_is_nothing_to_draw() -> None:
    pytest.importorskip("matplotlib")
    Path("plot.png").write_text("older")
    write(Path("silent.jsonl"), [row(512, 0, [1])])
    message = "nothing to plot: no request generates a token"
    assert refused("silent.jsonl", "--plot", "plot.png") == message
    assert refused("nope.jsonl", "--plot", "plot.png").endswith(
        "nope.jsonl: No such file or directory"
    )
    assert Path("plot.png").read_text() == "older"


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = "--plot needs matplotlib: pip install matplotlib"
    assert refused("trace.jsonl", "--plot", "plot.png") == message


# What is refused


def test_a_bad_row_is_named() -> None:
    write(Path("bad.jsonl"), [row(512, 1, [1]), {"input_length": 3}])
    assert refused("bad.jsonl") == (
        "bad.jsonl:2: has none of hash_ids, prompt_token_ids, prompt, messages"
    )
    assert refused("trace.jsonl", "--block-tokens", "16").startswith("trace.jsonl:1: ")
    write(Path("bad.jsonl"), [{"prompt": "Hello"}])
    assert (
        refused("bad.jsonl")
        == "bad.jsonl:1: prompt needs a tokenizer: give --model or --tokenizer, a folder"
    )
    assert refused("bad.jsonl", "--tokenizer", "none").startswith("bad.jsonl:1: the tokenizer ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-levels", "0"), "--max-levels must be a whole number >= 1, or all, got '0'"),
        (("--max-levels", "-1"), "--max-levels must be a whole number >= 1, or all, got '-1'"),
        (("--max-levels", "no"), "--max-levels must be a whole number >= 1, or all, got 'no'"),
        (("--heads", "9"), "9 query heads for 8 KV heads: no whole ratio"),
        (
            ("--model", ".", "--heads", "8"),
            "--model says which heads: give it, or --heads, --kv-heads, --head-size",
        ),
        (("--model", "no"), "--model no: is no folder; names of a hub are not looked up here"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: tuple[str, ...], message: str) -> None:
    assert refused("trace.jsonl", *options) == message


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"num_attention_heads": 0}'])
def test_a_model_without_heads_is_refused(content: str) -> None:
    Path("config.json").write_text(content)
    assert refused("trace.jsonl", "--model", ".").startswith("config.json: does not say which")


@pytest.mark.parametrize(
    "options", [("--concurrency", "0"), ("--block-tokens", "0"), ("--objective", "fun")]
)
def test_values_out_of_range_are_refused(options: tuple[str, ...]) -> None:
    result = cli("trace.jsonl", *options)
    assert result.exit_code == 2 and options[0] in result.stderr


# The process


def test_the_process_imports_neither_torch_nor_vllm() -> None:
    script = """
import sys
from vllm_relay.cli import main
sys.argv = ["vllm-relay", "explain", "trace.jsonl", "--json"]
try:
    main()
finally:
    assert not {"torch", "vllm", "transformers", "matplotlib"} & sys.modules.keys()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (["-c", script], ["-m", "vllm_relay.cli", "explain", "trace.jsonl", "--json"]):
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["requests"] == 60
