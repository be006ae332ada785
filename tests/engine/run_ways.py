"""Ways to serve, one after another on one engine: ``run_ways.py SPEC.json RESULT.json``.

SPEC: ``engine`` (arguments of `vllm.LLM`), ``ways`` (methods of `Ways`), ``plants`` (per pass an
error of `in_worker.PLANTS`, or null), ``prefixes`` (token ids), ``regex`` (of structured output),
``adapters`` (paths). RESULT: ``counters`` per worker, and ``passes``: of each way ``answers``
(name -> its ``(token, logprob)`` pairs), ``relayed`` (steps, per worker) and what else it returns.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEMBERS = 4
CHUNK = 48


def prompts(prefixes: Sequence[list[int]]) -> list[list[int]]:
    """`MEMBERS` prompts behind each prefix, with ends of several lengths."""
    return [[*p, *_tokens(5 + 9 * i, i, j)] for j, p in enumerate(prefixes) for i in range(MEMBERS)]


def _tokens(count: int, i: int, j: int) -> list[int]:
    return [3 + (97 * i + 31 * j + 13 * k) % 2000 for k in range(count)]


def _pairs(output: Any) -> list[tuple[int, float]]:
    return [(t, step[t].logprob) for t, step in zip(output.token_ids, output.logprobs, strict=True)]


class Ways:
    """The ways; each returns ``answers``."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        self.spec, self.prompts = spec, prompts(spec["prefixes"])
        self.llm = LLM(
            worker_extension_cls="tests.engine.in_worker.WorkerExtension",
            enable_prefix_caching=True,
            disable_log_stats=False,
            seed=0,
            **spec["engine"],
        )
        self.engine = self.llm.llm_engine

    def _generate(
        self, given: list[list[int]], lora: Any = None, **params: Any
    ) -> dict[str, list[tuple[int, float]]]:
        from vllm import SamplingParams

        options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0, **params}
        requests = [{"prompt_token_ids": prompt} for prompt in given]
        done = self.llm.generate(
            requests, SamplingParams(**options), lora_request=lora, use_tqdm=False
        )
        return {
            f"{i}-{output.index}": _pairs(output)
            for i, request in enumerate(done)
            for output in request.outputs
        }

    def warm_up(self, lora: Any = None) -> None:
        """Put the prefixes into the prefix cache: requests that come together then share them."""
        for prefix in self.spec["prefixes"]:
            self._generate([prefix], lora, max_tokens=1)

    def greedy(self) -> dict[str, Any]:
        return {"answers": self._generate(self.prompts)}

    def sampled(self) -> dict[str, Any]:
        """Eight samples of a prompt per prefix at temperature 1, as GRPO draws them."""
        return {"answers": self._generate(self.prompts[::MEMBERS], n=8, temperature=1.0, seed=5)}

    def beams(self) -> dict[str, Any]:
        from vllm.sampling_params import BeamSearchParams

        prompts = self.prompts[::MEMBERS]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
        done, answers = self.llm.beam_search(given, params), {}
        for i, request in enumerate(done):
            for j, beam in enumerate(request.sequences):
                tokens = beam.tokens[len(prompts[i]) :]
                steps = zip(tokens, beam.logprobs, strict=True)
                answers[f"{i}-{j}"] = [(t, step[t].logprob) for t, step in steps]
        return {"answers": answers}

    def structured(self) -> dict[str, Any]:
        """Answers that a grammar allows; also their ``texts``."""
        from vllm.sampling_params import StructuredOutputsParams

        grammar = StructuredOutputsParams(regex=self.spec["regex"])
        answers = self._generate(
            self.prompts, structured_outputs=grammar, max_tokens=24, ignore_eos=False
        )
        decode = self.llm.get_tokenizer().decode
        tokens = [[token for token, _ in answer] for answer in answers.values()]
        return {"answers": answers, "texts": [decode(t, skip_special_tokens=True) for t in tokens]}

    def priority(self) -> dict[str, Any]:
        """Urgent requests that come later, in a pool that cannot hold all; also the order in which
        requests ``ended``, and ``preemptions``."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=56, ignore_eos=True, logprobs=0)
        before, ended, answers = self._preemptions(), [], {}
        waves = [("low", 9), ("high", 0)]
        while waves or self.engine.has_unfinished_requests():
            name, priority = waves.pop(0) if waves else ("", 0)
            for i, prompt in enumerate(self.prompts if name else []):
                request = {"prompt_token_ids": prompt}
                self.engine.add_request(f"{name}-{i}", request, params, priority=priority)
            for output in [output for _ in range(20) for output in self.engine.step()]:
                if output.finished:
                    ended.append(output.request_id)
                    answers[output.request_id] = _pairs(output.outputs[0])
        preemptions = self._preemptions() - before
        return {"answers": answers, "ended": ended, "preemptions": preemptions}

    def _preemptions(self) -> int:
        found = self.llm.get_metrics()
        return sum(m.value for m in found if m.name == "vllm:num_preemptions")

    def chunked(self) -> dict[str, Any]:
        """Long prompts behind a prefix, prefilled by `CHUNK` tokens beside decodes; also how many
        requests had so many ``queries`` in relayed steps."""
        prefix = self.spec["prefixes"][0]
        long = [[*prefix, *_tokens(300, i, 5)] for i in range(2)]
        return self._with_queries([*self.prompts, *long], 8)

    def long_greedy(self) -> dict[str, Any]:
        """More tokens of each request; also ``queries``, as `chunked`."""
        return self._with_queries(self.prompts, 24)

    def _with_queries(self, given: list[list[int]], tokens: int) -> dict[str, Any]:
        before, answers = self._queries(), self._generate(given, max_tokens=tokens)
        queries = {count: n - before.get(count, 0) for count, n in self._queries().items()}
        return {"answers": answers, "queries": queries}

    def _queries(self) -> dict[str, int]:
        seen = self.llm.collective_rpc("seen_steps")[0]["queries"]
        return {str(count): requests for count, requests in seen.items()}

    def adapted(self) -> dict[str, Any]:
        """Two LoRA adapters in one batch; every request has one."""
        from vllm.lora.request import LoRARequest

        paths = self.spec["adapters"]
        adapters = [LoRARequest(f"adapter-{i}", 1 + i, path) for i, path in enumerate(paths)]
        for adapter in adapters:
            self.warm_up(adapter)
        of = [adapters[i // 2 % 2] for i in range(len(self.prompts))]
        return {"answers": self._generate(self.prompts, of)}

    def woken(self) -> dict[str, Any]:
        """`greedy` after sleep and wake, which on CPUs pause the scheduler and nothing else."""
        self.llm.sleep(level=1)
        self.llm.wake_up()
        return self.greedy()


def run(spec: dict[str, Any]) -> dict[str, Any]:
    ways = Ways(spec)
    ask = ways.llm.collective_rpc

    def relayed() -> list[int]:
        return [worker["steps_relayed"] for worker in ask("counters")]

    ask("watch_steps")
    passes = []
    for plant in spec["plants"]:
        ask("plant", args=(plant,))
        passes.append(found := {})
        for name in spec["ways"]:
            assert ways.llm.reset_prefix_cache()
            ways.warm_up()
            before = relayed()
            found[name] = getattr(ways, name)()
            found[name]["relayed"] = [b - a for a, b in zip(before, relayed(), strict=True)]
    return {"passes": passes, "counters": ask("counters")}


if __name__ == "__main__":
    spec_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(run(json.loads(spec_path.read_text()))))
