"""Building of system-KV files: an engine's own prefill computes the KV that is stored."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from vllm_relay.config import CAPTURE_CONNECTOR
from vllm_relay.system_kv import capture
from vllm_relay.system_kv.cache_groups import STATE
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile, write_file
from vllm_relay.system_kv.identity import engine_settings, identify
from vllm_relay.system_kv.manifest import Identity, Layer, Manifest, tensor_names
from vllm_relay.system_kv.parts import LayerKV, join
from vllm_relay.system_kv.prompts import Prompt

# KV tokens beside those of each prompt: its last block is partly filled.
_SPARE = 256


@dataclass(frozen=True)
class Prefill:
    """Size and duration of the prefill of all prompts.

    Attributes:
        tokens: of all prompts. padded_tokens: if each were padded to the longest.
        steps: forward passes. seconds: of the prefill alone.
    """

    tokens: int
    padded_tokens: int
    steps: int
    seconds: float


class Builder:
    """An engine that computes the KV of some prompts, packed together without padding.

    vLLM's scheduler fills each step with tokens of several prompts, as Prepacking (arXiv
    2404.09529) proposes.

    Args:
        engine_args: vLLM's EngineArgs; changed. scratch: see `scratch.scratch_folder`.
        chat_template: the value of ``--chat-template``, or None.

    Attributes:
        tokenizer: the model's, or None with ``skip_tokenizer_init``.
        identity: the engine's `Identity`; it takes a read of the weights' files.
    """

    def __init__(self, engine_args: Any, scratch: Path, chat_template: str | None = None) -> None:
        from vllm.config import KVTransferConfig
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.usage.usage_lib import UsageContext

        if engine_args.data_parallel_size > 1:
            raise SystemKVError("build with data_parallel_size 1; any number can load the file")
        engine_args.enable_prefix_caching = False  # every prompt's rows have to be computed
        engine_args.enforce_eager = True  # the connector sees no rows inside a CUDA graph
        engine_args.speculative_config = None
        engine_args.kv_transfer_config = KVTransferConfig(
            kv_connector=CAPTURE_CONNECTOR,
            kv_connector_module_path=capture.MODULE,
            kv_role="kv_producer",
            kv_connector_extra_config={"folder": str(scratch), "prompts": []},
        )
        self._scratch = scratch
        # The limits of a server: a prompt is cut into the same chunks, and so rounded alike.
        self._config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        model = self._config.model_config
        if model.has_inner_state:
            raise SystemKVError(f"system KVs cannot be used: {STATE}")
        self.tokenizer = None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)
        self.identity: Identity = identify(self._config, chat_template)

    def prefill(
        self, prompts: Sequence[Prompt], report: Callable[[str, int], None] = lambda doing, n: None
    ) -> Prefill:
        """Start the engine, compute all prompts into the scratch folder, stop the engine.

        Args:
            report: called often with the phase and the tokens done.

        Raises:
            SystemKVError: a prompt is too long, or given twice.
        """
        longest = self._config.model_config.max_model_len
        seen: dict[tuple[int, ...], str] = {}
        for prompt in prompts:
            if not 1 <= len(prompt.token_ids) < longest:
                raise SystemKVError(
                    f"prompt {prompt.name} has {len(prompt.token_ids):,} tokens; this engine takes "
                    f"from 1 to {longest - 1:,} (max_model_len less one)"
                )
            if prompt.token_ids in seen:
                raise SystemKVError(
                    f"prompts {seen[prompt.token_ids]} and {prompt.name} are the same tokens"
                )
            seen[prompt.token_ids] = prompt.name
        from vllm import SamplingParams
        from vllm.v1.engine.llm_engine import LLMEngine

        extra = self._config.kv_transfer_config.kv_connector_extra_config
        extra["prompts"] = [list(prompt.token_ids) for prompt in prompts]
        self._take_memory([len(prompt.token_ids) for prompt in prompts])
        report("starting the engine", 0)
        engine = LLMEngine.from_vllm_config(self._config)
        try:
            started = time.monotonic()
            with _watched(self._scratch, report) as counts:
                for i, prompt in enumerate(prompts):
                    engine.add_request(
                        str(i),
                        {"prompt_token_ids": list(prompt.token_ids)},
                        SamplingParams(max_tokens=1, detokenize=False),
                    )
                while engine.has_unfinished_requests():
                    engine.step()
            seconds = time.monotonic() - started
        finally:
            engine.engine_core.shutdown()
        tokens = [len(prompt.token_ids) for prompt in prompts]
        done, steps = map(int, counts)
        if done != sum(tokens):
            raise SystemKVError(
                f"of {sum(tokens):,} tokens only {done:,} were seen in every layer: "
                "this model or attention backend is not supported"
            )
        return Prefill(sum(tokens), len(tokens) * max(tokens), steps, seconds)

    def _take_memory(self, lengths: Sequence[int]) -> None:
        """Set a KV cache of what the prompts need, so that a server can run beside the build.

        A size in vLLM's options, ``--kv-cache-memory-bytes``, stays.
        """
        cache, model = self._config.cache_config, self._config.model_config
        if cache.kv_cache_memory_bytes is not None:
            return
        if "max_model_len" not in self.identity.rope:  # else another length is other KV
            model.max_model_len = max(lengths) + 1
        at_once = max(lengths) + self._config.scheduler_config.max_num_batched_tokens
        tokens = max(model.max_model_len, min(sum(lengths), at_once)) + _SPARE * len(lengths)
        parallel = self._config.parallel_config
        row = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
        layers = padded_layers(getattr(model.hf_text_config, "layer_types", None) or ())
        layers *= model.get_num_layers(parallel)
        cache.kv_cache_memory_bytes = math.ceil((tokens + _SPARE) * row * layers)
        # Not read beside the size, but compared with the memory that is free.
        cache.gpu_memory_utilization = 0.01

    def tensors(self, index: int, prompt: Prompt) -> tuple[dict[str, torch.Tensor], list[Layer]]:
        """One prompt's KV by tensor name, joined over the workers, and the joined layers.

        All tokens, those before `Layer.first_token` too.
        """
        shards = capture.read_shards(self._scratch)
        parts: list[LayerKV] = []
        kept: dict[str, int] = {}
        for rank, shard in shards.items():
            file = capture.shard_file(self._scratch, index, rank)
            mapped = shard.map(file, len(prompt.token_ids))
            kept |= shard.kept
            for layer in shard.layers:
                keys, values = mapped[layer.name]
                parts.append(LayerKV(layer=layer, keys=keys, values=values))
        tensors, layers = join(parts, self._config.model_config.get_total_num_kv_heads())
        tokens = len(prompt.token_ids)
        return tensors, [
            replace(layer, first_token=max(0, tokens - kept.get(layer.name, tokens)))
            for layer in layers
        ]

    def write(self, index: int, prompt: Prompt, path: Path) -> tuple[Manifest, int]:
        """Write one prompt's file; returns its manifest and size in bytes."""
        whole, layers = self.tensors(index, prompt)
        tensors = {
            name: whole[name][layer.first_token :]
            for layer in layers
            for name in tensor_names(layer.name)
        }
        identity = vars(self.identity).copy()
        if prompt.kind != "system-prompt":
            identity["chat_template"] = None
        manifest = Manifest(
            name=prompt.name,
            kind=prompt.kind,
            token_ids=prompt.token_ids,
            text=self.tokenizer.decode(list(prompt.token_ids)) if self.tokenizer else None,
            **identity,
            layers=tuple(layers),
            engine=engine_settings(self._config),
            created=datetime.now().astimezone().isoformat(timespec="seconds"),
            checksums={},
        )
        return manifest, write_file(path, manifest, tensors, self._scratch)


def padded_layers(kinds: Iterable[str]) -> float:
    """Layers that the KV cache has room for, over those of a model with these kinds of layers.

    vLLM's KV cache groups are of one kind each and equally large: as the rarest kind.
    """
    counts = Counter(kinds).values()
    group = min(counts, default=1)
    return sum(math.ceil(n / group) * group for n in counts) / max(1, sum(counts)) or 1.0


@contextmanager
def _watched(scratch: Path, report: Callable[[str, int], None]) -> Iterator[torch.Tensor]:
    """Reports the tokens that the first worker counts; yields its counts, tokens and steps."""
    counts, done = capture.map_progress(scratch), threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            report("prefill", int(counts[0]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield counts
    finally:
        done.set()
        thread.join()
        report("prefill", int(counts[0]))


def largest_difference(
    file: SystemKVFile, tensors: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest difference of one token in one tensor from a fresh prefill, and where it is.

    The root mean square of the difference over that of the fresh values; inf for a NaN.
    """
    worst, where = 0.0, ""
    for layer in file.manifest.layers:
        stored = file.tensors(layer.name)
        for name, theirs in zip(tensor_names(layer.name), stored, strict=True):
            ours = tensors[name][layer.first_token :].float()
            squares = (theirs.float() - ours).square().mean((1, 2)), ours.square().mean((1, 2))
            rms = (squares[0] / squares[1]).sqrt().nan_to_num(torch.inf)
            token = int(rms.argmax())
            value = float(rms[token])
            if value >= worst:
                worst, where = value, f"token {layer.first_token + token} of tensor {name}"
    return worst, where
