"""Patches of vLLM inside an engine's process, applied before the engine is made.

Each function patches classes of vLLM or of ours in place.
"""

import functools
import inspect
from typing import Any

import torch

_cascades = 0
_replays = 0


def count_cascades() -> None:
    """Count from now on how often vLLM's runner V1 decides for its own cascade attention."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    stock = FlashAttentionMetadataBuilder.use_cascade_attention

    @functools.wraps(stock)
    def use_cascade_attention(self: Any, *args: Any, **kwargs: Any) -> bool:
        global _cascades
        decided = stock(self, *args, **kwargs)
        _cascades += decided
        return decided

    FlashAttentionMetadataBuilder.use_cascade_attention = use_cascade_attention


def cascades() -> int:
    """Steps counted by `count_cascades`, per KV cache group."""
    return _cascades


def count_replays() -> None:
    """Count from now on how often a full CUDA graph is run, on either runner; captures of runner V1
    count, too."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.forward_context import get_forward_context, is_forward_context_available
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    stock_run, stock_call = CudaGraphManager.run_fullgraph, CUDAGraphWrapper.__call__

    @functools.wraps(stock_run)
    def run_fullgraph(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _replays
        _replays += 1
        return stock_run(self, *args, **kwargs)

    @functools.wraps(stock_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _replays
        # Of runner V1 the same class runs piecewise graphs, a part of the model each.
        if self.runtime_mode.name == "FULL" and is_forward_context_available():
            _replays += get_forward_context().cudagraph_runtime_mode == self.runtime_mode
        return stock_call(self, *args, **kwargs)

    CudaGraphManager.run_fullgraph, CUDAGraphWrapper.__call__ = run_fullgraph, call


def replays() -> int:
    """Full graphs counted by `count_replays`."""
    return _replays


def force_tokens_on_v2() -> None:
    """Let runner V2 produce ``extra_args["force"]``; it takes no logits processors.

    ``extra_args["prompt_tokens"]`` says where a request's first token stands. Logprobs are of the
    logits as they were.
    """
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    stock_add, stock_sample = Sampler.add_request, Sampler.sample
    signature = inspect.signature(stock_sample)

    @functools.wraps(stock_add)
    def add_request(self: Any, req_idx: int, *args: Any) -> None:
        stock_add(self, req_idx, *args)
        extra = args[-1].extra_args or {}
        tables = _forced_tables(self)
        if "force" not in extra:
            tables.pop(req_idx, None)
            return
        tables[req_idx] = (extra["prompt_tokens"], extra["force"])

    @functools.wraps(stock_sample)
    def sample(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sampled, logits = stock_sample(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        slots = given["idx_mapping_np"]
        tables = _forced_tables(self)
        if not len(slots) or len(slots) != len(sampled) or not all(s in tables for s in slots):
            return sampled, logits  # warm-up, or a batch that nothing is forced on
        starts = torch.tensor([tables[s][0] for s in slots], device=sampled.device)
        tokens = torch.tensor([tables[s][1] for s in slots], device=sampled.device)
        # The last prompt token, at prompt_tokens - 1, yields the first; chunks before it are thrown
        # away by the runner.
        place = (given["pos"] - (starts - 1)).clamp(0, tokens.shape[1] - 1)
        forced = tokens.gather(1, place[:, None].long())[:, 0]
        return forced.to(sampled.dtype), logits

    Sampler.add_request, Sampler.sample = add_request, sample


def _forced_tables(sampler: Any) -> dict[int, tuple[int, list[int]]]:
    """Slot of a request -> its prompt's length and its tokens."""
    return sampler.__dict__.setdefault("_forced", {})


def plant_wrong_lse() -> None:
    """An error for a check to find: 0.1 is added to the LSE of every shared segment.

    Only where layers run: the self-test at the start, which would refuse them, has its own name for
    the function.
    """
    from vllm_relay.backend import cuda_impl

    stock = cuda_impl.paged_relay

    @functools.wraps(stock)
    def paged_relay(q: Any, k: Any, v: Any, step: Any, attend: Any, **kwargs: Any) -> Any:
        def wrong(part: Any, *args: Any, **more: Any) -> Any:
            lse = attend(part, *args, **more)
            return lse if part.causal else lse + 0.1

        return stock(q, k, v, step, wrong, **kwargs)

    cuda_impl.paged_relay = paged_relay
