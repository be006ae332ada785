"""Run one vLLM engine with system KVs: ``run_system_kv.py SPEC.json RESULT.json``.

SPEC: ``engine`` (arguments of `vllm.LLM`) and ``program``, a list of [operation, argument], see
`Program`. RESULT: ``results``, one per operation.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_relay.system_kv import status


class Program:
    """The operations; each takes one argument."""

    def __init__(self, engine: dict[str, Any]) -> None:
        self.llm = LLM(
            logits_processors=["tests.engine.in_worker:ForceTokens"],
            worker_extension_cls="tests.engine.in_worker.WorkerExtension",
            seed=0,
            **{"enforce_eager": True, "disable_log_stats": True, **engine},
        )

    def generate(self, given: dict[str, Any]) -> dict[str, Any]:
        """``prompts``, ``steps``; ``force``, ``salt`` if any; all at once, or one by one."""
        prompts, force = given["prompts"], given.get("force")
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=given["steps"],
                ignore_eos=True,
                logprobs=1,
                detokenize=False,
                extra_args={"force": force[i]} if force else None,
            )
            for i in range(len(prompts))
        ]
        requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for request in requests:
            if "salt" in given:
                request["cache_salt"] = given["salt"]
        batches = (
            [[i] for i in range(len(prompts))] if given.get("one_by_one") else [range(len(prompts))]
        )
        done = []
        for batch in batches:
            done += self.llm.generate(
                [requests[i] for i in batch], [params[i] for i in batch], use_tqdm=False
            )
        outputs = [request.outputs[0] for request in done]
        return {
            "cached": [request.num_cached_tokens for request in done],
            "tokens": [list(o.token_ids) for o in outputs],
            "logprobs": [
                [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]
                for o in outputs
            ],
        }

    def status(self, _: None) -> list[dict[str, Any]]:
        return status(self.llm)

    def counters(self, _: None) -> list[dict[str, int]]:
        return self.llm.collective_rpc("relay_counters")

    def metric(self, name: str) -> float:
        """A counter of vLLM's; needs ``disable_log_stats`` False."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def reset(self, _: None) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=level)

    def wake(self, _: None) -> None:
        self.llm.wake_up()

    def rpc(self, given: list[Any]) -> list[Any]:
        """A method of `in_worker.WorkerExtension` and its arguments."""
        return self.llm.collective_rpc(given[0], args=tuple(given[1:]))

    def asked_to_rewrite(self, _: None) -> bool:
        """Whether a step in which nothing may be scheduled makes the workers write again."""
        core = self.llm.llm_engine.engine_core.engine_core
        metadata = core.scheduler.get_kv_connector().build_connector_meta(None)
        return metadata.rewrite is not None

    def stop(self, _: None) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def pool(self, block_ids: list[int]) -> dict[str, Any]:
        """The block pool itself; needs the engine in this process."""
        pool = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        blocks = [pool.blocks[i] for i in block_ids]
        return {
            "blocks": len(pool.blocks),
            "free": pool.get_num_free_blocks(),
            "references": [block.ref_cnt for block in blocks],
            "hashed": [block.block_hash is not None for block in blocks],
        }


if __name__ == "__main__":
    spec_path, result_path = map(Path, sys.argv[1:])
    spec = json.loads(spec_path.read_text())
    program = Program(spec["engine"])
    results = [getattr(program, name)(argument) for name, argument in spec["program"]]
    result_path.write_text(json.dumps({"results": results}))
