"""A small KV pool under load, in a process of its own: ``run_load.py SPEC.json RESULT.json``.

Waves of requests share prefixes that change from wave to wave, so that blocks are evicted and
reused; some waves outgrow the pool (preemption), every third one loses requests half way (aborts),
long prompts are prefilled in chunks beside decodes. RESULT: what the worker watched, its counters,
the number of preemptions, aborts and resets, and per wave and request its ``(token, logprob)``
pairs.

SPEC: ``model``, ``vocabulary``; ``backend``; ``watch`` as `in_worker.WorkerExtension.watch`, None
for not at all. If any: ``engine`` (more arguments of `vllm.LLM`), ``waves``, ``steps`` (tokens to
produce), ``salts`` (three requests of a wave have one), ``lora`` (paths of two adapters, of which
each names one), ``prefix`` (tokens that half of the prompts begin with), ``resets`` (of the prefix
cache after every fifth wave, after every thirtieth with new weights).
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 128
POOL = 26
WAVES = 20


def wave(index: int, vocabulary: int) -> tuple[list[list[int]], int]:
    """Prompts and tokens to produce: two groups and a loner, prefixes of one or two blocks."""
    rng = np.random.default_rng(index)

    def tokens(count: int) -> list[int]:
        return rng.integers(3, vocabulary, count).tolist()

    prompts = []
    for members in (4, 3):
        prefix = tokens(BLOCK * int(rng.integers(1, 3)) + int(rng.integers(0, BLOCK)))
        prompts += [prefix + tokens(int(rng.integers(1, 60))) for _ in range(members)]
    prompts.append(tokens(100) * 3)  # repeated: n-gram drafts are made of it
    return prompts, 330 if index % 8 == 3 else 12


class Load:
    """An engine under the load of a SPEC."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        options = {
            "additional_config": {"relay": {"min_saved_tokens": 0}},
            "max_num_batched_tokens": 384,
            "block_size": BLOCK,
            "num_gpu_blocks_override": POOL,
            **spec.get("engine", {}),
        }
        self.llm = LLM(
            spec["model"],
            attention_backend=spec["backend"],
            worker_extension_cls="tests.engine.in_worker.WorkerExtension",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=1024,
            max_num_seqs=16,
            disable_log_stats=False,
            seed=0,
            **options,
        )
        self.engine = self.llm.llm_engine
        self.spec, self.happened = spec, {"aborts": 0, "resets": 0, "reloads": 0}

    def run_wave(self, index: int) -> dict[str, list[tuple[int, float]]]:
        """Tokens and their log-probabilities by request; those of aborted ones up to there."""
        from vllm import SamplingParams

        prompts, steps = wave(index, self.spec["vocabulary"])
        steps = self.spec.get("steps", steps)
        params = SamplingParams(
            temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False, logprobs=0
        )
        for i, prompt in enumerate(prompts):
            self.engine.add_request(f"{index}-{i}", self._request(prompt, i), params, **self._of(i))
        done: dict[str, Any] = {}
        aborted = [f"{index}-{i}" for i in (1, 2, 5)] if index % 3 == 2 else []
        answers: dict[str, list[tuple[int, float]]] = {name: [] for name in aborted}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                done[output.request_id] = output.outputs[0]
            if aborted and any(len(o.token_ids) >= 5 for o in done.values()):
                self.engine.abort_request(aborted)
                self.happened["aborts"] += len(aborted)
                aborted = []
        return answers | {
            name: [(t, step[t].logprob) for t, step in zip(o.token_ids, o.logprobs, strict=True)]
            for name, o in sorted(done.items())
        }

    def _request(self, prompt: list[int], i: int) -> dict[str, Any]:
        if i % 2 and self.spec.get("prefix"):
            prompt = self.spec["prefix"] + prompt
        salt = {"cache_salt": "a"} if self.spec.get("salts") and i in (0, 2, 4) else {}
        return {"prompt_token_ids": prompt, **salt}

    def _of(self, i: int) -> dict[str, Any]:
        if not self.spec.get("lora"):
            return {}
        from vllm.lora.request import LoRARequest

        which = i % 2  # all have one: vLLM's CPU kernels give those without the adapter of others
        adapter = LoRARequest(f"adapter-{which}", 1 + which, self.spec["lora"][which])
        return {"lora_request": adapter}

    def between_waves(self, index: int) -> None:
        """Resets of the prefix cache, some of them with new weights."""
        if not self.spec.get("resets") or index % 5 != 4:
            return
        if index % 30 == 29:
            self.llm.collective_rpc("scale_weights", args=(1.1 if index % 60 == 29 else 0.9,))
            self.happened["reloads"] += 1
        assert self.llm.reset_prefix_cache()
        self.happened["resets"] += 1


def run(spec: dict[str, Any]) -> dict[str, Any]:
    load = Load(spec)
    if spec["watch"] is not None:
        load.llm.collective_rpc("watch", args=(spec["watch"],))
    answers = []
    for index in range(spec.get("waves", WAVES)):
        answers.append(load.run_wave(index))
        load.between_waves(index)
    metrics = load.llm.get_metrics()
    return {
        "answers": answers,
        "preemptions": sum(m.value for m in metrics if m.name == "vllm:num_preemptions"),
        **load.happened,
        "watched": load.llm.collective_rpc("watched"),
        "counters": load.llm.collective_rpc("counters"),
    }


if __name__ == "__main__":
    spec_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(run(json.loads(spec_path.read_text()))))
