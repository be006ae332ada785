"""Run transformers in fp32 over given tokens: ``reference_run.py SPEC.json RESULT.json``.

SPEC: ``model``, ``prompts`` and ``tokens`` that follow each. RESULT: ``tokens`` and their
``logprobs``, both [requests][steps], as in a pass of `run_engine`.
"""

import json
import sys
from pathlib import Path
from typing import Any


def run_reference(
    folder: Path, model: Path, prompts: list[list[int]], tokens: list[list[int]]
) -> dict[str, Any]:
    """The RESULT, of a process of its own."""
    from tests.engine.engine import run_forked

    spec, result = folder / "reference_spec.json", folder / "reference_result.json"
    spec.write_text(json.dumps({"model": str(model), "prompts": prompts, "tokens": tokens}))
    status, log = run_forked(Path(__file__), [str(spec), str(result)], folder)
    assert status == 0, f"transformers failed:\n{log[-6000:]}"
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).eval()
    logprobs = []
    for prompt, tokens in zip(spec["prompts"], spec["tokens"], strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        produced = logits[len(prompt) - 1 : -1].log_softmax(-1)
        logprobs.append(produced.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist())
    return {"tokens": spec["tokens"], "logprobs": logprobs}


if __name__ == "__main__":
    spec_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(_run(json.loads(spec_path.read_text()))))
