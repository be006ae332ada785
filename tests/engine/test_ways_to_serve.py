"""Ways to serve: with relay in all of its steps, each answers as stock vLLM, and an error planted
in relay is seen in its answers.
"""

import json
import math
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.harness.random_model import VOCABULARY, write_model
from tests.engine.engine import ROOT, run_engine
from tests.engine.run_ways import CHUNK, prompts
from tests.engine.scraped import PROMETHEUS, queries, scraping
from tests.engine.served import Served
from tests.engine.system_kv import run_relay
from tests.soak.differential import differences, write_adapter
from vllm_relay.monitoring.prometheus import COUNTERS
from vllm_relay.serving import processes

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 32
# Two prefixes of five full blocks.
PREFIXES = np.random.default_rng(4).integers(3, VOCABULARY, size=(2, 5 * BLOCK)).tolist()
RELAY: dict[str, Any] = {
    "attention_backend": "relay",
    "additional_config": {"relay": {"min_saved_tokens": 0}},
}
EAGER = {"enforce_eager": True}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
# Limits that split long prompts, and a pool that the urgent requests find full.
LIMITS = {
    "scheduling_policy": "priority",
    "max_num_batched_tokens": 128,
    "long_prefill_token_threshold": CHUNK,
}
TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
TWICE = ["--data-parallel-size", "2", "--api-server-count", "2"]
SERVER = {
    "PYTHONPATH": str(ROOT),
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
TEXT = "benchmarks/harness/text/gpl-3.txt"
REGEX = "[a-f]{2,5}-[0-9]{2,5}"
COMPILED = ("greedy", "sampled", "beams", "structured", "priority", "chunked", "woken")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, with a tokenizer, which structured output and servers need."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    folder = write_model(tmp_path_factory.mktemp("ways") / "model", config, 3)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(
        str(ROOT / TEXT), VOCABULARY, special_tokens=list(names.values()), show_progress=False
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **names).save_pretrained(folder)
    return folder


def _run(
    model: Path,
    ways: Sequence[str],
    plants: Sequence[str | None],
    env: dict[str, str],
    **engine: Any,
) -> dict[str, Any]:
    settings = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 40,
        **engine,
    }
    paths = [str(model.parent / f"adapter-{i}") for i in (1, 2)]
    spec = {"ways": ways, "plants": plants, "prefixes": PREFIXES, "regex": REGEX, "adapters": paths}
    return run_engine(model.parent, {**spec, "engine": settings}, "run_ways.py", **env)


@pytest.fixture(scope="module")
def stock(model: Path) -> dict[str, Any]:
    """Answers of stock vLLM, in one process, not compiled."""
    for seed in (1, 2):
        write_adapter(model.parent / f"adapter-{seed}", model, seed)
    ways = [way for way in COMPILED if way != "woken"]
    (found,) = _run(
        model, [*ways, "adapted", "long_greedy"], [None], {}, **EAGER, **LORA, **LIMITS
    )["passes"]
    assert all(way["relayed"] == [0] for way in found.values())
    return {**found, "woken": found["greedy"]}


@pytest.fixture(scope="module")
def compiled(model: Path) -> dict[str, Any]:
    """Relay in vLLM's default mode, all ways of `COMPILED`, without and with an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(model.parent / "cache"))
        return _run(model, COMPILED, [None, "lse"], {}, **LIMITS, **RELAY)


def _check(
    result: dict[str, Any], stock: dict[str, Any], way: str, workers: int = 1
) -> dict[str, Any]:
    """Assert that the way was relayed and its answers are stock's, in the pass without an error
    alone; returns what it found there."""
    good, planted = (found[way] for found in result["passes"])
    expected = stock[way]["answers"]
    for found in (good, planted):
        assert len(found["relayed"]) == workers and min(found["relayed"]) >= 4
    assert all(worker["fallbacks"] == 0 for worker in result["counters"])
    _check_answers(good["answers"], expected)
    assert differences([planted["answers"]], [expected])[0], f"the error is not seen in {way}"
    return good


def _check_answers(answers: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong, compared = differences([answers], [expected])
    assert wrong == []
    assert compared > 0.9 * sum(map(len, expected.values()))  # all but what follows a tie


@pytest.mark.parametrize("way", COMPILED)
def test_the_default_compiled_mode(
    way: str, compiled: dict[str, Any], stock: dict[str, Any]
) -> None:
    found = _check(compiled, stock, way)
    if way == "sampled":
        assert len(found["answers"]) == 2 * 8
    elif way == "structured":
        assert all(re.fullmatch(REGEX, text) for text in found["texts"])
    elif way == "priority":
        assert found["preemptions"] > 0
        assert found["ended"] == stock[way]["ended"] and found["ended"][-1].startswith("low")
    elif way == "chunked":
        assert found["queries"][str(CHUNK)] >= 4


def test_the_default_mode_compiles(compiled: dict[str, Any]) -> None:
    assert "Warming up model for the compilation" in compiled["log"]


def test_lora_adapters(model: Path, stock: dict[str, Any]) -> None:
    result = _run(model, ["adapted"], [None, "lse"], {}, **EAGER, **LORA, **RELAY)
    _check(result, stock, "adapted")
    assert differences([stock["adapted"]["answers"]], [stock["greedy"]["answers"]])[0]


def test_tokens_of_a_draft_model(model: Path, stock: dict[str, Any]) -> None:
    draft = {"model": str(_write_draft(model)), "num_speculative_tokens": 3}
    result = _run(
        model, ["long_greedy"], [None, "lse"], {}, speculative_config=draft, **EAGER, **RELAY
    )
    found = _check(result, stock, "long_greedy")
    # The target's steps verify three tokens of each request.
    assert found["queries"]["4"] > 20


def _write_draft(model: Path) -> Path:
    """The model with noise on its weights: some of its tokens are accepted."""
    folder = Path(shutil.copytree(model, model.parent / "draft"))
    generator, noisy = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(model / "model.safetensors").items():
        noise = torch.randn(weight.shape, generator=generator)
        noisy[name] = weight + (0.15 * weight.float().std() * noise).to(weight.dtype)
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_two_tensor_parallel_workers(model: Path, stock: dict[str, Any]) -> None:
    result = _run(
        model, ["greedy"], [None, "lse"], TWO_WORKERS, tensor_parallel_size=2, **EAGER, **RELAY
    )
    _check(result, stock, "greedy", workers=2)
    # Each worker reads its half of the KV heads; only one of them writes to the log.
    assert len(re.findall("[2-8] requests share 320 tokens in 2 groups", result["log"])) == 1


def test_two_pipeline_stages(model: Path, stock: dict[str, Any]) -> None:
    # Traced, not compiled: vLLM's CPU engine has no pipeline in eager mode.
    traced = {"compilation_config": {"mode": 2, "backend": "eager"}}
    env = {**TWO_WORKERS, "VLLM_CACHE_ROOT": str(model.parent / "cache")}
    result = _run(
        model, ["greedy"], [None, "lse"], env, pipeline_parallel_size=2, **traced, **RELAY
    )
    _check(result, stock, "greedy", workers=2)


def test_data_parallel_engines_behind_two_api_servers_restarted_under_load(
    model: Path, stock: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = _flags(model, tmp_path)
    text = tmp_path / "text.txt"
    text.write_text((ROOT / TEXT).read_text()[:1000])
    port = processes.free_port()
    monkeypatch.setattr(processes, "free_port", lambda: port)

    def check(server: processes.Server, folder: Path, engines: int) -> Served:
        folder.mkdir()
        served = Served(server.url, model, prompts(PREFIXES))
        _check_answers(served.answers(), stock["greedy"]["answers"])
        assert served.hits(8) == [4, 4]  # of both system KVs
        assert len(relayed := served.relayed(folder)) == engines and min(relayed) >= 4
        assert served.counted("steps_relayed", relayed) == sorted(relayed)
        pinned = json.loads(run_relay("pin", "--url", served.url, "--text", text, "--json"))
        assert [answer["engine"] for answer in pinned] == list(range(engines))
        assert len({answer["pinned"]["label"] for answer in pinned}) == 1
        saved = [x["saved"] for x in json.loads(run_relay("save", "--url", served.url, "--json"))]
        assert len(saved) == engines and set.intersection(*map(set, saved))
        assert all((tmp_path / "kv" / name).exists() for names in saved for name in names)
        return served

    log = tmp_path / "first.log"
    with processes.serving(model, [*flags, *TWICE], log, env=SERVER) as server:
        served = check(server, tmp_path / "first", 2)
        served.rpc("plant", "lse")
        assert differences([served.answers()], [stock["greedy"]["answers"]])[0]
        with served.under_load():
            server._child.terminate()
        server._child.wait(60)
    # On one engine, which starts faster than two.
    with processes.serving(model, flags, tmp_path / "second.log", env=SERVER) as server:
        check(server, tmp_path / "second", 1)
    assert "remembered prefix" in (tmp_path / "second.log").read_text()


@pytest.mark.skipif(PROMETHEUS is None, reason="this machine has no prometheus")
def test_prometheus_shows_what_the_workers_count_in_every_panel(
    model: Path, tmp_path: Path
) -> None:
    flags, log = _flags(model, tmp_path), tmp_path / "server.log"
    with (
        processes.serving(model, [*flags, *TWICE], log, env=SERVER) as server,
        scraping(server.url, tmp_path / "prometheus") as prometheus,
    ):
        served = Served(server.url, model, prompts(PREFIXES))
        for _ in range(3):  # rates need load in several scrapes
            served.answers()
            time.sleep(2)
        (tmp_path / "counters").mkdir()
        served.rpc("write_counters", str(tmp_path / "counters"))
        workers = [json.loads(file.read_text()) for file in (tmp_path / "counters").iterdir()]
        assert len(workers) == 2 and min(worker["steps_relayed"] for worker in workers) >= 4
        for name in COUNTERS:
            expected = sorted(worker[name] for worker in workers)
            shown = prometheus.wait(
                f"vllm:relay_{name}_total", lambda x, y=expected: sorted(x.values()) == y
            )
            assert sorted(shown.values()) == expected, name
        for panel, query in queries(ROOT / "deploy/grafana-dashboard.json").items():
            shown = prometheus.values(query)
            assert shown and all(math.isfinite(value) for value in shown.values()), panel
        (saved,) = prometheus.values("sum(vllm:relay_kv_bytes_not_read_total)").values()
        assert saved == sum(worker["kv_bytes_not_read"] for worker in workers)


def _flags(model: Path, folder: Path) -> list[str]:
    """Options of a server with both system KVs, which are built in the folder."""
    kept = {"pins": True, "remember": str(folder / "kv")}
    system_kv = {"files": _build(model, folder), **kept}
    settings = {"min_saved_tokens": 0, "system_kv": system_kv}
    options = {
        "additional-config": json.dumps({"relay": settings}),
        "attention-backend": "relay",
        "worker-extension-cls": "tests.engine.in_worker.WorkerExtension",
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-seqs": 16,
        "block-size": BLOCK,
        "num-gpu-blocks-override": 64,
    }
    flags = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    return [*flags, "--enforce-eager"]


def _build(model: Path, folder: Path) -> list[str]:
    """Paths of a system-KV file for each prefix."""
    for i, prefix in enumerate(PREFIXES):
        (folder / f"{i}.json").write_text(json.dumps(prefix))
    sources = [x for i in range(len(PREFIXES)) for x in ("--token-ids", folder / f"{i}.json")]
    options = ("--enforce-eager", "--dtype", "float32", "--block-size", BLOCK)
    run_relay("build", "--model", model, *options, "--max-model-len", 512, *sources, "-o", folder)
    return [str(folder / f"{i}.relay") for i in range(len(PREFIXES))]
