"""The benchmarks that compare systems, each once, tiny, on real engines that are started once."""

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks import (
    bench_fewshot,
    bench_needles,
    bench_throughput,
    bench_tree,
    common,
    engines,
    plot,
)
from benchmarks.engines import Engine, Limits
from tests.e2e.engine import SMOLLM2
from vllm_relay.bench.systems import FOUR, SYSTEMS

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PREFIX = list(range(1000, 1300))


LAYERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of SmolLM2, with its tokenizer: fifteen times as fast."""
    folder = tmp_path_factory.mktemp("model")
    for path in SMOLLM2.iterdir():
        if path.suffix == ".json" or path.suffix == ".txt":
            shutil.copy(path, folder)
    config = json.loads((SMOLLM2 / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    tensors = load_file(SMOLLM2 / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if ".layers." not in name or int(name.split(".")[2]) < LAYERS
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def started(model: Path) -> Iterator[dict[str, Engine]]:
    """Four systems and their ceiling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        keys = (*FOUR, "no-attention")
        with engines.engines(model, keys, Limits(1024, 8), prefixes=[PREFIX]) as found:
            yield found


@pytest.fixture
def results(
    started: dict[str, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Scripts measure with these engines, and write their CSVs here."""

    def run(console: Any, model: Any, keys: Any, limits: Any, cases: Any, repeats: int, *_: Any):
        # one level or two are settings of the same engine
        chosen = {key: started[key if key in started else "relay"] for key in keys}
        return engines.measure(chosen, cases, repeats, console)

    for script in (bench_throughput, bench_fewshot, bench_needles, bench_tree):
        monkeypatch.setattr(script, "run", run)
    yield tmp_path


@pytest.mark.parametrize(
    ("script", "options", "count"),
    [
        (bench_throughput, "--prefix 64 256 --mix 8 4 --requests 4 --repeats 1", 4 * 4),
        (bench_fewshot, "--examples 0 1 --subjects 3 --questions 1 --steps 2 --repeats 1", 2 * 4),
        (bench_needles, "--document 400 --facts 3 --questions 1 2 --steps 4 --repeats 1", 2 * 5),
        (
            bench_tree,
            "--examples 256 --problem 0 128 --problems 2 --samples 2 --steps 3 --heads 2 1 64 "
            "--repeats 1",
            2 * 4,
        ),
    ],
    ids=["throughput", "fewshot", "needles", "tree"],
)
def test_it_measures_every_system_and_the_report_shows_it(
    script: Any, options: str, count: int, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = script.__name__.rpartition("bench_")[2]
    prov = common.provenance()

    def save(console: Any, name: str, rows: Any) -> Path:
        return common.write_csv(results / f"{name}.csv", rows, prov)

    monkeypatch.setattr(script, "save", save)
    assert script.main([*options.split(), "--save"]) == 0
    (path,) = results.glob(f"{name}-*.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == count
    assert all(float(row["seconds"]) > 0 and float(row["tokens"]) > 0 for row in rows)
    checked = [row for row in rows if SYSTEMS[row["system"]].attention]
    assert all(0 <= float(row["logprob_rms"]) < 0.1 for row in checked)
    monkeypatch.setattr(
        "sys.argv", ["plot.py", "--results", str(results), "--output", str(results)]
    )
    assert plot.main() == 0
    report = (results / "REPORT.md").read_text()
    assert path.name in report and path.with_suffix(".png").stat().st_size > 10_000


def test_wrong_answers_give_no_speed(
    started: dict[str, Engine], results: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """An engine that skips attention, in the place of relay."""

    def run(console: Any, model: Any, keys: Any, limits: Any, cases: Any, repeats: int, *_: Any):
        wrong = {"stock": started["stock"], "relay": started["no-attention"]}
        return engines.measure(wrong, cases, repeats, console)

    monkeypatch.setattr(bench_throughput, "run", run)
    options = "--prefix 64 --requests 2 --repeats 1 --save"
    assert bench_throughput.main(options.split()) == 1
    printed = capsys.readouterr().out
    assert "no speed is reported" in printed and "tokens/s" not in printed
    assert not list(results.glob("*.csv"))


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
