"""A small KV pool under load, in a process of its own: ``run_load.py SPEC.json RESULT.json``.

Waves of requests share prefixes that change from wave to wave, so that blocks are evicted and
reused; some waves outgrow the pool (preemption), every third one loses requests half way (aborts),
long prompts are prefilled in chunks beside decodes. RESULT: what the worker watched, its counters,
the number of preemptions, and per wave and surviving request its ``(token, logprob)`` pairs.
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
    prompts.append(tokens(300))
    return prompts, 330 if index % 8 == 3 else 12


def run(spec: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        spec["model"],
        attention_backend=spec["backend"],
        additional_config={"relay": {"min_saved_tokens": 0}},
        worker_extension_cls="tests.engine.in_worker.WorkerExtension",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=384,
        block_size=BLOCK,
        num_gpu_blocks_override=POOL,
        disable_log_stats=False,
        seed=0,
    )
    if spec["watch"] is not None:
        llm.collective_rpc("watch", args=(spec["watch"],))
    engine, answers = llm.llm_engine, []
    for index in range(WAVES):
        prompts, steps = wave(index, spec["vocabulary"])
        params = SamplingParams(
            temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False, logprobs=0
        )
        done: dict[str, Any] = {}
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{index}-{i}", {"prompt_token_ids": prompt}, params)
        aborted = [f"{index}-{i}" for i in (1, 5)] if index % 3 == 2 else []
        while engine.has_unfinished_requests():
            for output in engine.step():
                done[output.request_id] = output.outputs[0]
            if aborted and any(len(o.token_ids) >= 5 for o in done.values()):
                engine.abort_request(aborted)
                gone, aborted = aborted, []
                for request in gone:
                    done.pop(request, None)
        answers.append(
            {
                name: [
                    (t, step[t].logprob) for t, step in zip(o.token_ids, o.logprobs, strict=True)
                ]
                for name, o in sorted(done.items())
                if len(o.token_ids) == steps
            }
        )
    preemptions = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    return {
        "answers": answers,
        "preemptions": preemptions,
        "watched": llm.collective_rpc("watched")[0],
        "counters": llm.collective_rpc("counters")[0],
    }


if __name__ == "__main__":
    spec_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(run(json.loads(spec_path.read_text()))))
