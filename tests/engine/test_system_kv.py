"""Offline system KVs on the real engine: found, pinned, right, whatever loads them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.random_model import LAYERS, VOCABULARY, write_random_model
from tests.engine.engine import APART
from tests.engine.system_kv import BLOCK, build, run_program, run_relay
from vllm_relay.system_kv.file import SystemKVFile, write_file
from vllm_relay.system_kv.manifest import tensor_names

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# 5 full blocks of 128 and a rest that is prefilled with every request
TOKENS = np.random.default_rng(5).integers(3, VOCABULARY, size=700).tolist()
STEPS = 12
TP2 = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
# Root mean square of log-probability differences: rounding makes 0.03 here, foreign KV more than 1.
COARSE = 0.15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "model", 4, 2, 64)


@pytest.fixture(scope="module")
def file(model: Path) -> Path:
    return build(model.parent / "acme.relay", model, TOKENS, *OPTIONS)


OPTIONS = ("--skip-tokenizer-init", "--max-model-len", "2048")


def _engine(model: Path, *files: Path, **more: Any) -> dict[str, Any]:
    settings = {"min_saved_tokens": 0, "system_kv": [str(file) for file in files]}
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "num_gpu_blocks_override": 128,
        "attention_backend": "relay",
        "additional_config": {"relay": settings},
        **more,
    }


def _prompts(count: int, prefix: list[int] = TOKENS) -> list[list[int]]:
    return [[*prefix, 900 + i, 7 + i] for i in range(count)]


def _generate(count: int = 6, **more: Any) -> list[Any]:
    return ["generate", {"prompts": _prompts(count), "steps": STEPS, **more}]


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM answers without any of this."""
    engine = {**_engine(model), "attention_backend": "CPU_ATTN"}
    (answers,), _ = run_program(tmp_path_factory.mktemp("stock"), engine, [_generate()])
    return answers


def _distance(answers: dict[str, Any], reference: dict[str, Any]) -> float:
    assert answers["tokens"] == reference["tokens"]
    difference = np.array(answers["logprobs"]) - np.array(reference["logprobs"])
    return float(np.sqrt(np.mean(difference**2)))


def test_loaded_before_the_first_request_found_by_all_and_relayed(
    model: Path, file: Path, stock: dict[str, Any], tmp_path: Path
) -> None:
    program = [
        ["status", None],
        ["rpc", ["packed"]],
        _generate(force=stock["tokens"]),
        ["status", None],
        ["counters", None],
        ["rpc", ["wrong_blocks", str(file), [1, 2, 3, 4, 5]]],
        _generate(count=1, salt="a tenant of its own"),
    ]
    results, log = run_program(
        tmp_path, _engine(model, file), program, VLLM_ENABLE_V1_MULTIPROCESSING="1"
    )
    before, packed, answers, (after,), (counters,), wrong, salted = results
    assert before[0]["block_ids"] == [1, 2, 3, 4, 5] and before[0]["requests_hit"] == 0
    assert packed == [{"layers": [LAYERS], "pinned": [1, 2, 3, 4, 5]}]
    assert answers["cached"] == [5 * BLOCK] * 6
    assert _distance(answers, stock) < COARSE
    assert (after["requests_hit"], after["tokens_hit"]) == (6, 6 * 5 * BLOCK)
    assert after["cached"] and after["tokens"] == 700 and after["tokens_pinned"] == 640
    # the same forest finds them as any other sharing
    assert counters["steps_relayed"] >= STEPS - 4
    assert wrong == [0]
    assert salted["cached"] == [0]
    assert log.count(" in metrics): 640 of 700 tokens pinned in 5 blocks") == 1
    assert "GB/s, checksums included" in log


@pytest.mark.parametrize(
    ("built", "loaded"),
    [({"tp": 1}, {"tp": 2, "block_size": 64}), ({"tp": 2}, {"tp": 1, "block_size": 32})],
    ids=["tp1-to-tp2", "tp2-to-tp1"],
)
def test_tensor_parallel_degree_and_block_size_may_differ(
    built: dict[str, int],
    loaded: dict[str, int],
    model: Path,
    file: Path,
    stock: dict[str, Any],
    tmp_path: Path,
) -> None:
    if built["tp"] == 2:
        options = (*OPTIONS, "--tensor-parallel-size", "2")
        file = build(tmp_path / "acme.relay", model, TOKENS, *options, **TP2)
    engine = _engine(
        model, file, tensor_parallel_size=loaded["tp"], block_size=loaded["block_size"]
    )
    blocks = len(TOKENS) // loaded["block_size"]
    ids = list(range(1, blocks + 1))
    program = [
        _generate(force=stock["tokens"]),
        ["status", None],
        ["rpc", ["wrong_blocks", str(file), ids]],
    ]
    env = TP2 if loaded["tp"] == 2 else {}
    (answers, (status,), wrong), _ = run_program(tmp_path, engine, program, **env)
    assert answers["cached"] == [blocks * loaded["block_size"]] * 6
    assert _distance(answers, stock) < COARSE
    assert status["block_ids"] == ids
    assert wrong == [0] * loaded["tp"]


def test_workers_that_hold_the_same_kv_head(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", 4, 1, 64)
    options = (*OPTIONS, "--tensor-parallel-size", "2")
    file = build(tmp_path / "acme.relay", model, TOKENS, *options, **TP2)
    assert {layer.kv_heads for layer in SystemKVFile(file).manifest.layers} == {1}
    program = [_generate(), ["rpc", ["wrong_blocks", str(file), [1, 2, 3, 4, 5]]]]
    engine = _engine(model, file, tensor_parallel_size=2)
    (answers, wrong), _ = run_program(tmp_path, engine, program, **TP2)
    assert answers["cached"] == [640] * 6
    assert wrong == [0, 0]


def test_no_load_evicts_them(model: Path, file: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    pool_blocks = 40
    # 5 x the whole KV cache in other prompts, ten at a time
    count = 5 * pool_blocks * BLOCK // 1000 + 1
    others = rng.integers(3, VOCABULARY, size=(count, 1000)).tolist()
    ids = [1, 2, 3, 4, 5]
    program = [
        ["generate", {"prompts": others[i : i + 10], "steps": 1}] for i in range(0, count, 10)
    ]
    program += [["pool", ids], ["rpc", ["wrong_blocks", str(file), ids]], _generate(count=2)]
    engine = _engine(model, file, num_gpu_blocks_override=pool_blocks)
    results, _ = run_program(tmp_path, engine, program)
    *load, pool, wrong, answers = results
    assert all(cached == 0 for batch in load for cached in batch["cached"])
    assert pool["blocks"] == pool_blocks
    assert pool["free"] == pool_blocks - 1 - len(ids)  # block 0 is vLLM's null block
    assert pool["references"] == [1] * 5 and all(pool["hashed"])
    assert wrong == [0]
    assert answers["cached"] == [5 * BLOCK] * 2


def test_weights_that_were_changed_before_the_first_request_release_them(
    model: Path, file: Path, tmp_path: Path
) -> None:
    program = [
        ["rpc", ["scale_weights", 1.25]],  # and no reset
        _generate(count=2),
        ["status", None],
        ["pool", [1]],
    ]
    results, _ = run_program(tmp_path, _engine(model, file), program)
    assert results[1]["cached"][0] == 0
    assert results[2][0]["released"] == "the model's weights were changed"
    assert results[3]["free"] == results[3]["blocks"] - 1


def test_reset_sleep_and_wake_keep_them_and_new_weights_do_not(
    model: Path, file: Path, stock: dict[str, Any], tmp_path: Path
) -> None:
    ids = [1, 2, 3, 4, 5]
    others = np.random.default_rng(8).integers(3, VOCABULARY, size=(3, 640)).tolist()
    program = [
        ["rpc", ["watch", True]],
        ["reset", None],  # before anybody asked
        _generate(count=1),
        ["reset", None],
        ["status", None],
        ["asked_to_rewrite", None],
        _generate(force=stock["tokens"]),
        ["sleep", 1],
        ["wake", None],
        _generate(force=stock["tokens"]),
        _generate(count=1, salt="a tenant of its own"),
        ["rpc", ["packed"]],
        ["pool", ids],
        ["rpc", ["scale_weights", 1.25]],
        ["reset", None],
        _generate(count=1),
        ["status", None],
        ["pool", ids],
        ["rpc", ["packed"]],
        _generate(count=2),
        ["reset", None],
        _generate(count=1),
        # others in the same blocks, packed as well
        *(["generate", {"prompts": _prompts(4, prefix), "steps": STEPS}] for prefix in others),
        ["rpc", ["watched"]],
    ]
    engine = _engine(model, file, max_model_len=1024, num_gpu_blocks_override=16)
    results, log = run_program(tmp_path, engine, program)
    results.pop(0)
    # What is packed outlives the requests, and not the weights; what was read was never stale.
    assert results.pop(10) == [{"layers": [LAYERS], "pinned": ids}]
    assert results.pop(9)["cached"] == [0]
    assert results.pop(15) == [{"layers": [], "pinned": []}]
    (watched,) = results.pop()
    assert watched["reads"] > 0 and watched["stale"] == 0
    assert results[0] is True and results[2] is True and results[11] is True
    assert results[1]["cached"] == [640]
    assert results[3][0]["cached"] is False
    # vLLM steps a paused engine, too, while its weights are being changed
    assert results[4] is False
    for answers in (results[5], results[8]):
        assert answers["cached"] == [640] * 6
        assert _distance(answers, stock) < COARSE
    assert results[9]["references"] == [1] * 5
    # after an update of the weights the old KV must not be found, and its blocks are of use again
    assert results[12]["cached"] == [0]
    assert "weights were changed" in results[13][0]["released"]
    assert results[13][0]["blocks"] == 0
    assert results[14]["free"] == results[14]["blocks"] - 1
    assert results[15]["cached"] == [640] * 2  # by ordinary caching, of the new weights' KV
    assert results[16] is True and results[17]["cached"] == [0]
    assert log.count("relay: system KVs are not used any more: the model's weights were ch") == 1


def test_prompts_that_begin_alike_share_blocks_unless_one_has_a_salt(
    model: Path, file: Path, stock: dict[str, Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng(8)
    longer = TOKENS[: 3 * BLOCK] + rng.integers(3, VOCABULARY, size=300).tolist()
    branch = build(tmp_path / "acme.relay", model, longer, *OPTIONS)
    prompts = [*_prompts(2), *_prompts(2, longer)]
    salted = Path(shutil.copy(file, tmp_path / "salted.relay"))
    salts = tmp_path / "salts.json"
    salts.write_text(json.dumps({str(salted): "tenant-7"}))
    engine = _engine(model, file, branch, salted)
    files = engine["additional_config"]["relay"].pop("system_kv")
    settings = {"files": files, "salts": str(salts), "learn": True}
    engine["additional_config"]["relay"]["system_kv"] = settings
    program = [
        ["generate", {"prompts": prompts, "steps": 2}],
        ["status", None],
        _generate(force=stock["tokens"], salt="tenant-7"),
        ["status", None],
        _generate(count=1, salt="tenant-8"),
    ]
    (answers, before, found, after, not_found), log = run_program(tmp_path, engine, program)
    assert answers["cached"] == [640, 640, 640, 640]
    assert [entry["name"] for entry in before] == ["acme", "acme-2", "acme-3"]
    ids = [entry["block_ids"] for entry in before]
    assert ids == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [8, 9, 10, 11, 12]]
    assert [entry["requests_hit"] for entry in before] == [2, 2, 0]
    assert found["cached"] == [640] * 6 and _distance(found, stock) < COARSE
    assert [entry["requests_hit"] for entry in after] == [2, 2, 6]
    assert not_found["cached"] == [0]
    assert "tenant-7" not in log
    # half of 127 blocks, the default budget, less 12 pinned
    assert log.count("relay: system_kv.learn: hot prefixes may stay in 51 of 127 KV cache bl") == 1
    assert "system_kv.learn is off" not in log
    # The same content, so the same seal: labels of metrics tell them apart, and nothing else.
    seal = SystemKVFile(file).seal[:8]
    assert [before[0]["label"], before[2]["label"]] == [seal, f"{seal}-2"]


def test_an_engine_that_does_not_start_is_explained_in_the_last_line(
    model: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "model"))
    (broken / "model.safetensors").write_bytes(b"no weights")
    source = tmp_path / "prompt.json"
    source.write_text(str(TOKENS))
    given = ("--model", broken, "--token-ids", source, "-o", tmp_path)
    text = run_relay("build", *given, *OPTIONS, status=1, **APART)
    last = text.splitlines()[-1]
    assert last.startswith(
        "vllm-relay: the engine failed: safetensors._safetensors_rust.SafetensorError: "
    )


def test_beside_another_connector(
    model: Path, file: Path, stock: dict[str, Any], tmp_path: Path
) -> None:
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    program = [_generate(force=stock["tokens"]), ["status", None], ["counters", None]]
    engine = _engine(model, file, kv_transfer_config=other)
    (answers, (status,), (counters,)), log = run_program(tmp_path, engine, program)
    assert answers["cached"] == [640] * 6
    assert status["requests_hit"] == 6
    # relayed, too: test_connectors.py
    assert counters["steps_relayed"] >= STEPS - 4 and "relay: not used" not in log
    assert _distance(answers, stock) < COARSE


def test_several_prompts_in_one_start_and_a_fresh_prefill_agrees(
    model: Path, tmp_path: Path
) -> None:
    lengths = {"a": 700, "b": 130, "c": 301}
    for name, count in lengths.items():
        (tmp_path / f"{name}.json").write_text(str(TOKENS[700 - count :]))
    sources = [x for name in lengths for x in ("--token-ids", tmp_path / f"{name}.json")]
    common = ("--model", model, "--enforce-eager", *OPTIONS)
    text = run_relay("build", *common, *sources, "-o", tmp_path / "out")
    # 700 + 130 + 301 tokens against 3 x 700; the first may be under way before the others come
    assert re.search(r"1,131 tokens in [12] step", text) and "2,100 tokens (1.86 x)" in text
    files = [tmp_path / "out" / f"{name}.relay" for name in lengths]
    assert sorted((tmp_path / "out").iterdir()) == files
    text = run_relay("verify", *files, "--recompute", *common)
    assert text.count("good") == 3 and text.count("values: ") == 3
    # other weights are seen by their digest, and one wrong token by its values
    other = write_random_model(tmp_path / "other", 4, 2, 64, seed=1)
    text = run_relay("verify", *files, "--model", other, *OPTIONS, status=1)
    assert text.count("differs in the model's weights") == 3
    file = SystemKVFile(files[1])
    layers = [layer.name for layer in file.manifest.layers]
    tensors = {
        name: tensor.clone()
        for layer in layers
        for name, tensor in zip(tensor_names(layer), file.tensors(layer), strict=True)
    }
    tensors[tensor_names(layers[2])[1]][77] = 0
    write_file(tmp_path / "wrong.relay", file.manifest, tensors, tmp_path)
    text = run_relay("verify", tmp_path / "wrong.relay", "--recompute", *common, status=1)
    assert f"token 77 of tensor {layers[2]}.v differs most, by 100.00% of its rms" in text
