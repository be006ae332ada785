"""Run one vLLM engine over given prompts: ``run_engine.py SPEC.json RESULT.json``.

SPEC: ``engine`` (arguments of `vllm.LLM`), ``warm_up`` and ``prompts`` (token ids), ``force``
(tokens that each request must produce, or null for greedy), ``passes`` (an error of
`in_worker.PLANTS` to plant, or null, and steps). RESULT: ``counters`` of the first worker,
``workers``, ``layers`` (`vllm_relay.backend.layer_report`), ``levels`` and ``queries`` (how many
relayed steps had so many levels, and rows so many query tokens), and per pass ``tokens`` and
``logprobs`` of the produced tokens, both [requests][steps].
"""

import json
import sys
from pathlib import Path
from typing import Any


def run(spec: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        **spec["engine"],
        # not with speculative decoding, which vLLM does not combine with them
        logits_processors=["tests.engine.in_worker:ForceTokens"] if spec["force"] else None,
        worker_extension_cls="tests.engine.in_worker.WorkerExtension",
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )

    def generate(prompts: list[list[int]], steps: int, force: list[list[int]] | None) -> list[Any]:
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=steps,
                ignore_eos=True,
                logprobs=1,
                detokenize=False,
                extra_args={"force": force[i]} if force else None,
            )
            for i in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [r.outputs[0] for r in llm.generate(requests, params, use_tqdm=False)]

    generate(spec["warm_up"], 1, None)
    if spec["engine"].get("attention_backend") == "relay":
        llm.collective_rpc("watch_steps")
    results = []
    for name, steps in spec["passes"]:
        llm.collective_rpc("plant", args=(name,))
        outputs = generate(spec["prompts"], steps, spec["force"])
        results.append(
            {
                "tokens": [list(o.token_ids) for o in outputs],
                "logprobs": [
                    [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]
                    for o in outputs
                ],
            }
        )
    workers = llm.collective_rpc("counters")
    seen = llm.collective_rpc("seen_steps")[0]
    layers = llm.collective_rpc("report_layers", args=((), 0))[0]
    return {
        "passes": results,
        "counters": workers[0],
        "workers": workers,
        "layers": layers,
        **seen,
    }


if __name__ == "__main__":
    spec_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(run(json.loads(spec_path.read_text()))))
