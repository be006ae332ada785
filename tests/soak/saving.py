"""Saving: engines that remember, killed while they save (`system_kv.remember`).

Each chunk starts engines of a small random model one after another on one folder. An engine is
asked for a prompt that the hottest file holds, then serves prompts that become hot, a new one every
few requests, and begins a round of saving again and again; after a random time it is killed with
SIGKILL. The folder holds a dozen files, so the coldest are removed all the while.

Failures: an engine does not start; its first request does not find the hottest file's tokens, or is
answered otherwise than the same prompt without a cache; a file that is not whole.

    python -m tests.soak --part saving
"""

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from benchmarks.harness import random_model
from tests.engine.engine import environment
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.remembered_files import hottest_first

CHUNKS = 20
KILLS = 10
BLOCK, VOCABULARY = 32, 2048
PREFIX = 6 * BLOCK
# Seconds in which an engine starts, and in which it is killed after it has answered.
_START, _MOST = 120.0, 1.5


def run_chunk(chunk: int, kills: int = KILLS) -> dict[str, Any]:
    """The soak's row, from a process of its own that forks the engines."""
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(random_model, "LAYERS", 2):
            random_model.write_random_model(Path(folder) / "model", 4, 2, 32)
        result = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak.saving", folder, str(chunk), str(kills), result],
            env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return dict(json.loads(result.read_text()))


# In the process that forks the engines.


def _kill_engines(folder: Path, seed: int, kills: int) -> dict[str, Any]:
    import vllm  # noqa: F401, the engines are forked with it

    rng, kept = Random(seed), folder / "kv"
    found = {"kills": 0, "starts_with_files": 0, "hits": 0, "files_verified": 0}
    wrong = 0
    fork = multiprocessing.get_context("fork")
    for number in range(kills + 1):  # the last one starts after the last kill
        answer = folder / f"answer-{number}.json"
        engine = fork.Process(target=_serve, args=(folder, seed * 1000 + number, answer))
        engine.start()
        deadline = time.monotonic() + _START
        while not answer.exists() and engine.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        if answer.exists():
            row = json.loads(answer.read_text())
            found["starts_with_files"] += bool(row["hot"])
            found["hits"] += bool(row["hot"]) and row["cached"] == row["hot"]
            found["files_verified"] += row["verified"]
            wrong += row["broken"] + (row["cached"] != row["hot"] or not row["same"])
            while not hottest_first(kept) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, _MOST))
        else:
            print(f"engine {number} did not start")
            wrong += 1
        found["kills"] += engine.is_alive() and number < kills
        engine.kill()
        engine.join()
    return {**found, "failures": wrong}


def _serve(folder: Path, seed: int, answer: Path) -> None:
    """Verify the files, answer a request under the hottest, then save for ever."""
    # Here, since the process that forks must not have started threads of its own.
    kept = folder / "kv"
    files = hottest_first(kept) if kept.exists() else []
    broken = 0
    for path in files:
        try:
            SystemKVFile(path).verify()
        except SystemKVError as error:
            print(error, flush=True)
            broken += 1
    hot = list(SystemKVFile(files[0]).manifest.token_ids) if files else []

    from vllm import LLM, SamplingParams

    from vllm_relay.system_kv import remembering

    remembering.ROUND_SECONDS = 0.05
    llm = LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK,
        max_num_seqs=4,
        num_gpu_blocks_override=96,
        attention_backend="relay",
        additional_config={
            "relay": {"system_kv": {"remember": str(folder / "kv"), "remember_gib": 0.002}}
        },
    )
    rng = Random(seed)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    def ask(prompt: list[int], length: int, **more: Any) -> Any:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        given: Any = {"prompt_token_ids": prompt, **more}
        (done,) = llm.generate([given], params, use_tqdm=False)
        return done.num_cached_tokens, list(done.outputs[0].token_ids)

    prompt = [*hot, *tokens(5)]
    cached, found = ask(prompt, 8)
    _, expected = ask(prompt, 8, cache_salt="none")
    draft = answer.with_suffix(".draft")
    row = {"hot": len(hot), "cached": cached, "same": found == expected}
    draft.write_text(json.dumps({**row, "verified": len(files) - broken, "broken": broken}))
    draft.rename(answer)
    for _ in count():
        prefix = tokens(PREFIX)
        for _ in range(6):
            ask([*prefix, *tokens(BLOCK)], 2)


if __name__ == "__main__":
    where, chunk_number, kill_count, result_path = sys.argv[1:]
    row = _kill_engines(Path(where), int(chunk_number), int(kill_count))
    Path(result_path).write_text(json.dumps(row))
