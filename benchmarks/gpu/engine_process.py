"""One vLLM engine in a process of its own: ``python -m benchmarks.gpu.engine_process SPEC ROWS``.

SPEC (JSON): ``job`` ("force", "free", "decode" or "reference"), ``cases`` (a list, each with a
``name``), ``until`` (`time.time` at which no further case starts), and for engines ``engine``
(arguments of `vllm.LLM`), ``patches`` (functions "module:name" to call before it is made),
``forcing`` ("v1" or "v2": the runner). ROWS gets a JSON line per finished case, at once.
"""

import functools
import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.journal import describe
from vllm_relay import metrics

Spec = dict[str, Any]


def make_engine(spec: Spec) -> Any:
    """The `vllm.LLM` of a spec, with the plugin registered whether it is installed or not."""
    import vllm_relay
    from benchmarks.gpu import engine_patches

    vllm_relay.register_name()
    vllm_relay.register()
    engine_patches.count_replays()
    for patch in spec.get("patches", []):
        module, _, name = patch.partition(":")
        getattr(importlib.import_module(module), name)()
    from vllm import LLM

    more = {}
    if spec.get("forcing") == "v1":
        more["logits_processors"] = ["benchmarks.harness.force_tokens:ForceTokens"]
    return LLM(
        **spec["engine"],
        **more,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )


def relayed() -> int:
    """Steps that the engine, which runs in this process, relayed so far."""
    return metrics.counters()["steps_relayed"]


def force(llm: Any, case: Spec) -> Spec:
    """Generate the forced tokens of a case.

    Returns:
        ``tokens`` and their ``logprobs``; of all requests, ``cached`` tokens of prompts;
        ``steps_relayed`` and ``replays`` of full graphs.
    """
    from vllm import SamplingParams

    from benchmarks.gpu import engine_patches

    def params(prompt: list[int], forced: list[int] | None, steps: int) -> Any:
        extra = {"force": forced, "prompt_tokens": len(prompt)} if forced else None
        return SamplingParams(
            temperature=0,
            max_tokens=len(forced) if forced else steps,
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            extra_args=extra,
        )

    def generate(prompts: list[list[int]], forced: list[list[int]] | None, steps: int) -> list[Any]:
        settings = [params(p, forced[i] if forced else None, steps) for i, p in enumerate(prompts)]
        requests = [{"prompt_token_ids": p} for p in prompts]
        return list(llm.generate(requests, settings, use_tqdm=False))

    if case["warm_up"]:
        generate(case["warm_up"], None, 1)
    before, replays_before = relayed(), engine_patches.replays()
    done = generate(case["prompts"], case["force"], case.get("steps", 0))
    outputs = [request.outputs[0] for request in done]
    return {
        "cached": sum(request.num_cached_tokens or 0 for request in done),
        "tokens": [list(o.token_ids) for o in outputs],
        "logprobs": [
            [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]
            for o in outputs
        ],
        "steps_relayed": relayed() - before,
        "replays": engine_patches.replays() - replays_before,
    }


def free(llm: Any, case: Spec) -> Spec:
    """`force` without forcing, each request's own tokens; with the ``reference`` of these."""
    row = force(llm, {**case, "force": None, "steps": len(case["force"][0])})
    exact = _read_reference(llm.llm_engine.model_config.model)
    row["exact"] = reference(exact, {**case, "force": row["tokens"]})["logprobs"]
    return row


def decode(llm: Any, case: Spec) -> Spec:
    """Time steady decode: windows of steps in each of which every request produced a token.

    Returns:
        ``rates`` (tokens per second of each window), ``tokens`` (the first of each request),
        ``steps_relayed``, ``cascades`` and ``replays`` (of full graphs) over the whole case.

    Raises:
        RuntimeError: a step inside a window produced fewer tokens (a request was preempted).
    """
    import numpy as np
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from benchmarks.gpu import engine_patches

    rng = np.random.default_rng(case["seed"])
    low, high = 3, case["vocabulary"]
    prefix = rng.integers(low, high, case["shared"]).tolist()
    prompts = [prefix + rng.integers(low, high, case["own"]).tolist() for _ in range(case["batch"])]
    if prefix:
        warm = SamplingParams(max_tokens=1, detokenize=False)
        llm.generate([{"prompt_token_ids": [*prefix, low]}], warm, use_tqdm=False)

    windows, steps, settle = case["windows"], case["steps"], case["settle"]
    relayed_before, cascades_before = relayed(), engine_patches.cascades()
    replays_before = engine_patches.replays()
    params = SamplingParams(
        temperature=0,
        max_tokens=case["limit"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    answers: dict[str, list[int]] = {f"{case['name']}-{i}": [] for i in range(len(prompts))}
    for name, prompt in zip(answers, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    marks: list[float] = []
    counted = 0
    while len(marks) <= windows:
        if not engine.has_unfinished_requests():
            raise RuntimeError(f"requests ended within {len(marks)} of {windows} windows")
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            answers[output.request_id] += output.outputs[0].token_ids
        if not marks:
            if min(map(len, answers.values())) >= settle:
                marks.append(now)
        elif outputs:
            if len(outputs) != len(answers):
                raise RuntimeError(f"a step produced {len(outputs)} of {len(answers)} tokens")
            counted += 1
            if counted % steps == 0:
                marks.append(now)
    engine.abort_request(list(answers))
    for _ in range(3):  # batches still in flight
        engine.step()
    return {
        "rates": [len(answers) * steps / (b - a) for a, b in itertools.pairwise(marks)],
        "tokens": [tokens[:4] for tokens in answers.values()],
        "steps_relayed": relayed() - relayed_before,
        "cascades": engine_patches.cascades() - cascades_before,
        "replays": engine_patches.replays() - replays_before,
    }


def reference(model: Any, case: Spec) -> Spec:
    """Log-probabilities of the forced tokens from transformers' own code in float32."""
    import torch

    logprobs = []
    for prompt, forced in zip(case["prompts"], case["force"], strict=True):
        ids = torch.tensor([[*prompt, *forced[:-1]]], device=model.device)
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=len(forced)).logits[0].float()
        chosen = torch.tensor(forced, device=model.device)[:, None]
        found = torch.log_softmax(logits, -1).gather(1, chosen)
        logprobs.append(found[:, 0].tolist())
    return {"tokens": case["force"], "logprobs": logprobs}


def make_reference(spec: Spec) -> Any:
    return _read_reference(spec["engine"]["model"])


@functools.cache
def _read_reference(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


JOBS = {
    "force": (make_engine, force),
    "free": (make_engine, free),
    "decode": (make_engine, decode),
    "reference": (make_reference, reference),
}


def graph_mode(made: Any) -> str:
    """The CUDA graph mode that the engine arrived at, "" for what is no engine."""
    engine = getattr(made, "llm_engine", None)
    mode = engine and engine.vllm_config.compilation_config.cudagraph_mode
    return getattr(mode, "name", "")


def main(spec: Spec, rows: Path) -> None:
    make, job = JOBS[spec["job"]]
    made = make(spec)
    for case in spec["cases"]:
        row: Spec = {"name": case["name"], "cudagraph_mode": graph_mode(made)}
        if time.time() >= spec["until"]:
            row["left_out"] = True
        else:
            try:
                row |= job(made, case)
            except Exception as error:
                row["error"] = describe(error)
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    sys.stdout.flush()
    # Nothing is left to do; vLLM's and CUDA's teardown can take long or hang.
    os._exit(0)
