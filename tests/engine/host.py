"""Runs scripts in forked children of a process that has imported vLLM: only the first waits for it.

    python -m tests.engine.host

One run per line of stdin, as JSON: ``script`` (a path), ``argv``, ``cwd``, ``env`` (all of it) and
``log``, the file that gets both output channels. One line of stdout per run: its exit status. What
else is written to stdout, as the log of vLLM is, goes to stderr.
"""

import gc
import json
import os
import runpy
import signal
import sys
from typing import Any

TIMEOUT_S = 900


def preload() -> None:
    """Import what is vLLM's and expensive. Our package is left to each run."""
    import torch
    import vllm
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine
    from vllm.model_executor.models import registry

    vllm.LLM  # noqa: B018 resolved on first use
    # The class of a model is looked at in the child itself; a process of its own would import vLLM.
    registry._run_in_subprocess = lambda look: look()
    if not torch.cpu._is_avx512_bf16_supported():
        widen_products()
    # In the parent, so that a collection in a child does not touch, and so copy, what they share.
    gc.freeze()


def widen_products() -> None:
    """Products with bf16 weights in float32, rounded once: as on a CPU that has them in bf16.

    On one that has not, oneDNN's take 5 to 8 times as long.
    """
    import torch
    from vllm.model_executor.layers import utils

    stock, linear = utils.dispatch_cpu_unquantized_gemm, torch.nn.functional.linear

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.dtype != torch.bfloat16 or layer.weight.ndim != 2:
            return stock(layer, remove_weight)
        weight = layer.weight.detach().as_subclass(torch.Tensor).float()

        def product(x: Any, _: Any, bias: Any) -> Any:
            return linear(x.float(), weight, None if bias is None else bias.float()).bfloat16()

        layer.cpu_linear = product

    utils.dispatch_cpu_unquantized_gemm = dispatch


def run(given: dict[str, Any]) -> None:
    """In the child: end as the script ends."""
    log = os.open(given["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for channel in (1, 2):
        os.dup2(log, channel)
    os.close(0)
    signal.alarm(TIMEOUT_S)
    os.chdir(given["cwd"])
    os.environ.clear()
    os.environ.update(given["env"])
    sys.argv = [given["script"], *given["argv"]]
    sys.path[0] = os.path.dirname(given["script"])
    runpy.run_path(given["script"], run_name="__main__")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    preload()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, file=answers, flush=True)


if __name__ == "__main__":
    main()
