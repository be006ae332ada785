"""A small model, and a folder for the CSVs of scripts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.harness import latin_square, result_csv
from benchmarks.suites import (
    bench_attention,
    bench_decode,
    bench_learn,
    bench_order,
    bench_prepacking,
    bench_replay,
    bench_serving,
)
from tests.engine.engine import SMOLLM2

LAYERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of SmolLM2, with its tokenizer: fifteen times as fast."""
    folder = tmp_path_factory.mktemp("model")
    for path in SMOLLM2.iterdir():
        if path.suffix != ".safetensors":
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


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts write their CSVs here."""
    prov = result_csv.source()

    def save(console: Any, name: str, rows: Any, eager: bool, dtype: str = "auto") -> Path:
        columns = prov | {"mode": "eager" if eager else "compiled"}
        return result_csv.write_csv(tmp_path / f"{name}.csv", rows, columns)

    suites = (
        bench_attention,
        bench_decode,
        bench_learn,
        bench_order,
        bench_prepacking,
        bench_replay,
        bench_serving,
    )
    for module in (latin_square, *suites):
        monkeypatch.setattr(module, "save_engines", save)
    return tmp_path
