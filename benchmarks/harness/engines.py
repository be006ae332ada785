"""Compared systems as vLLM engines of one process."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import engine_environment, model_dtype
from vllm_relay import metrics
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving.agreement import Answer
from vllm_relay.serving.commands import build_system_kv
from vllm_relay.serving.systems import SYSTEMS, System, memory_share

# Tokens of a KV block of the CPU engine.
KV_BLOCK = 128


class BenchWorker:
    """vLLM's ``worker_extension_cls``."""

    def counters(self) -> dict[str, float]:
        """Relay's counters; of vLLM's own workers, which lack ``relay_counters``, too."""
        return metrics.counters()

    def gemm_rate(self) -> float:
        """Operations per second of a matrix product on the engine's threads."""
        from benchmarks.harness.roofline import gemm_rate

        return gemm_rate()

    def skip_attention(self) -> int:
        """Replaces attention by zeros; KV is still written. Returns the number of layers."""
        from vllm.v1.attention.backend import AttentionImpl

        context = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        layers = [
            x for x in context.values() if isinstance(getattr(x, "impl", None), AttentionImpl)
        ]

        def zeros(*args: Any, output: Any = None, **kwargs: Any) -> Any:
            out = output if output is not None else args[6]
            return out.zero_()

        for layer in layers:
            layer.impl.forward = zeros
        return len(layers)


@dataclass(frozen=True)
class Limits:
    """Capacity of every engine of a run, and its mode.

    Attributes:
        kv_blocks: of its KV cache; None: what fits. eager: without ``torch.compile``.
    """

    max_model_len: int
    max_num_seqs: int
    kv_blocks: int | None = None
    eager: bool = False


@dataclass
class Finished:
    """Result of one batch.

    Attributes:
        seconds: from its submission. prefill_seconds: of them, until every request had a token.
        tokens: generated. cached: prompt tokens found in the prefix cache. answers: in prompt
            order. decode_tok_s: tokens per second from the moment that every request has its second
            token. ttft_s: seconds until the first token of each prompt, in their order.
    """

    seconds: float
    prefill_seconds: float
    tokens: int
    cached: int
    answers: list[Answer]
    decode_tok_s: float
    ttft_s: list[float] = field(default_factory=list)


class Engine:
    """`vllm.LLM` stepped by hand, so that decode is timed apart from prefill."""

    def __init__(
        self,
        model: Path,
        system: System,
        limits: Limits,
        settings: dict[str, Any] | None = None,
        share: float | None = None,
    ) -> None:
        from vllm import LLM  # takes seconds: --help should not wait for it

        self._llm = LLM(
            str(model),
            attention_backend="relay" if system.relay else None,
            additional_config={"relay": {**system.settings, **(settings or {})}},
            skip_tokenizer_init=True,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            num_gpu_blocks_override=limits.kv_blocks,
            enforce_eager=limits.eager,
            dtype=model_dtype(),
            enable_prefix_caching=system.caching,
            worker_extension_cls="benchmarks.harness.engines.BenchWorker",
            **({} if share is None else {"gpu_memory_utilization": share}),
        )
        if not system.attention:
            assert self._llm.collective_rpc("skip_attention")[0] > 0
        self._requests = 0

    def close(self) -> None:
        """Ends the engine's process."""
        self._llm.llm_engine.engine_core.shutdown()

    def counters(self) -> dict[str, float]:
        return dict(self._llm.collective_rpc("counters")[0])

    def forget(self) -> None:
        """Empties the prefix cache; pinned system KV stays."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: requests are running")

    def gemm_rate(self) -> float:
        """Operations per second of a matrix product on the engine's threads."""
        return float(self._llm.collective_rpc("gemm_rate")[0])

    def finish(
        self, prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float = 0
    ) -> Finished:
        """Generates ``lengths[i]`` tokens for each prompt, all submitted at once.

        Raises:
            RuntimeError: vLLM ended a request early.
        """
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        outputs: dict[str, Any] = {}
        cached: dict[str, int] = {}
        firsts: dict[str, float] = {}
        started = time.perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            self._requests += 1
            params = SamplingParams(
                temperature=temperature,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=2,
            )
            engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, params)
        first, begun, counted = 0.0, 0.0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output.outputs[0]
                cached[output.request_id] = output.num_cached_tokens or 0
                firsts.setdefault(output.request_id, time.perf_counter() - started)
            if not begun and len(outputs) == len(prompts):
                now = time.perf_counter()
                first = first or now
                made = [len(o.token_ids) for o in outputs.values()]
                if min(made) >= 2:
                    begun, counted = now, sum(made)
        ended = time.perf_counter()
        in_order = [o for _, o in sorted(outputs.items(), key=lambda item: int(item[0]))]
        tokens = sum(len(o.token_ids) for o in in_order)
        if tokens != sum(lengths):
            asked = max(len(x) + n for x, n in zip(prompts, lengths, strict=True))
            raise RuntimeError(
                f"{tokens:,} of {sum(lengths):,} tokens: max_model_len is less than {asked:,}"
            )
        return Finished(
            ended - started,
            first - started,
            tokens,
            sum(cached.values()),
            [list(map(with_lead, o.token_ids, o.logprobs)) for o in in_order],
            (tokens - counted) / (ended - begun) if begun and ended > begun else 0.0,
            [seconds for _, seconds in sorted(firsts.items(), key=lambda item: int(item[0]))],
        )


def with_lead(token: int, best: dict[int, Any]) -> tuple[int, float, float]:
    """Element of an `Answer` from vLLM's log-probabilities of one step."""
    logprob = best[token].logprob
    return token, logprob, logprob - max(x.logprob for key, x in best.items() if key != token)


def build_files(
    model: Path, prefixes: Sequence[Sequence[int]], folder: Path, max_model_len: int
) -> list[Path]:
    """System-KV files of these token ids, made by ``vllm-relay build``."""
    options = ["--enforce-eager", "--skip-tokenizer-init", "--dtype", model_dtype()]
    options += ["--max-model-len", str(max_model_len)]
    for number, prefix in enumerate(prefixes):
        source = folder / f"prefix-{number}.json"
        source.write_text(json.dumps(list(prefix)))
        options += ["--token-ids", str(source)]
    build_system_kv(model, folder, options)
    return sorted(folder.glob("*.relay"))


def close(engines: dict[str, Engine]) -> None:
    """Ends the engines in parallel: each takes seconds."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(Engine.close, engines.values()))


@contextmanager
def engines(
    model: Path,
    keys: Sequence[str],
    limits: Limits,
    *,
    prefixes: Sequence[Sequence[int]] = (),
    settings: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda doing: None,
) -> Iterator[dict[str, Engine]]:
    """Starts these systems; ends them after the body.

    Args:
        prefixes: token ids whose KV `relay-system-kv` loads from files, built here.
        settings: relay's settings, beside those of a system.
    """
    started: dict[str, Engine] = {}
    with ExitStack() as stack:
        stack.enter_context(ended_in_order())
        stack.enter_context(engine_environment())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        files: list[str] = []
        # Less than a KV block cannot be pinned.
        pinned = [prefix for prefix in prefixes if len(prefix) >= KV_BLOCK]
        if pinned and any(SYSTEMS[key].system_kv for key in keys):
            report(f"computing the KV of {len(pinned)} prefixes")
            built = build_files(model, pinned, Path(folder), limits.max_model_len)
            files = list(map(str, built))
        import torch
        import vllm.entrypoints.llm  # noqa: F401  # configures CUDA, which is queried next

        # The CPU engines' KV caches have the size of the environment.
        share = memory_share(len(keys)) if torch.cuda.is_available() else None
        stack.callback(close, started)

        # One at a time: each measures what it finds free, a GPU's memory or attention's speed.
        for key in keys:
            report(f"starting: {SYSTEMS[key].label}")
            loaded = {"system_kv": files} if SYSTEMS[key].system_kv else {}
            own = {**(settings or {}), **loaded}
            started[key] = Engine(model, SYSTEMS[key], limits, own, share)
        yield started
