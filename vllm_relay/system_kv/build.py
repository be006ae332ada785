"""From prompts to files, with the engine itself: its prefill computes the KV that is stored."""

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from vllm_relay.config import CAPTURE_CONNECTOR
from vllm_relay.system_kv import capture
from vllm_relay.system_kv.file import Layer, Manifest, SystemKVError, tensor_names, write_file
from vllm_relay.system_kv.identity import Identity, identify
from vllm_relay.system_kv.prompts import Prompt

_SCRATCH = ".vllm-relay-build-"


@dataclass(frozen=True)
class Prefill:
    """What the prefill of all prompts took.

    Attributes:
        tokens: of all prompts. padded_tokens: had each been padded to the longest.
        steps: forward passes. seconds: of the prefill alone.
    """

    tokens: int
    padded_tokens: int
    steps: int
    seconds: float


class Builder:
    """An engine that computes the KV of some prompts, packed together without padding.

    vLLM's scheduler fills each step with tokens of several prompts, which is what Prepacking
    (arXiv 2404.09529) asks for; nothing is padded.

    Args:
        engine_args: vLLM's EngineArgs; some settings are changed: no prefix caching, no
            speculation, eager mode, our own KV connector.
        scratch: a folder for unfinished files, see `scratch_folder`.
        chat_template: as given by ``--chat-template``, or None.

    Attributes:
        tokenizer: the model's, or None with ``skip_tokenizer_init``.
        identity: what the engine's KV depends on; reads the weights' files.
    """

    def __init__(self, engine_args: Any, scratch: Path, chat_template: str | None = None) -> None:
        from vllm.config import KVTransferConfig
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.usage.usage_lib import UsageContext

        if engine_args.data_parallel_size > 1:
            raise SystemKVError("build with data_parallel_size 1; any number can load the file")
        engine_args.enable_prefix_caching = False  # so that every prompt's rows are computed
        engine_args.enforce_eager = True  # in a CUDA graph they would pass unseen
        engine_args.speculative_config = None
        engine_args.kv_transfer_config = KVTransferConfig(
            kv_connector=CAPTURE_CONNECTOR,
            kv_connector_module_path=capture.MODULE,
            kv_role="kv_producer",
            kv_connector_extra_config={"folder": str(scratch), "prompts": []},
        )
        self._scratch = scratch
        # the limits of a server: a prompt is cut into the same chunks, and so rounded alike
        self._config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        model = self._config.model_config
        self.tokenizer = None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)
        self.identity: Identity = identify(self._config, chat_template)

    def prefill(
        self, prompts: Sequence[Prompt], report: Callable[[str, int], None] = lambda doing, n: None
    ) -> Prefill:
        """Start the engine, compute all prompts, stop it; the KV lies in the scratch folder.

        Args:
            prompts: what to compute. report: called now and then with what is being done and the
                tokens computed so far.

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
        report("starting the engine", 0)
        engine = LLMEngine.from_vllm_config(self._config)
        try:
            progress = _Progress(self._scratch, report)
            started = time.monotonic()
            with progress:
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
        if progress.tokens != sum(tokens):
            raise SystemKVError(
                f"of {sum(tokens):,} tokens only {progress.tokens:,} were seen in every layer: "
                "this model or attention backend is not supported"
            )
        return Prefill(sum(tokens), len(tokens) * max(tokens), progress.steps, seconds)

    def tensors(self, index: int, prompt: Prompt) -> tuple[dict[str, torch.Tensor], list[Layer]]:
        """One prompt's KV by tensor name, joined over the workers, and the whole layers."""
        shards = capture.read_shards(self._scratch)
        parts: dict[str, list[tuple[int, Layer, tuple[torch.Tensor, torch.Tensor]]]] = {}
        for rank, shard in shards.items():
            file = capture.shard_file(self._scratch, index, rank)
            mapped = shard.map(file, len(prompt.token_ids))
            for layer in shard.layers:
                parts.setdefault(layer.name, []).append(
                    (shard.tensor_rank, layer, mapped[layer.name])
                )
        total = self._config.model_config.get_total_num_kv_heads()
        tensors, layers = {}, []
        for name, held in parts.items():
            held.sort(key=lambda part: part[0])
            # With more workers than KV heads several hold the same ones.
            heads = held[0][1].kv_heads * len(held)
            held = held[:: max(1, heads // total)]
            first = held[0][1]
            for which, tensor_name in enumerate(tensor_names(name)):
                slices = [part[2][which] for part in held]
                tensors[tensor_name] = slices[0] if len(slices) == 1 else torch.cat(slices, 1)
            layers.append(
                Layer(
                    name,
                    sum(part[1].kv_heads for part in held),
                    first.head_size,
                    first.k_scale,
                    first.v_scale,
                )
            )
        return tensors, layers

    def write(self, index: int, prompt: Prompt, path: Path) -> tuple[Manifest, int]:
        """Write one prompt's file; returns its manifest and size in bytes."""
        tensors, layers = self.tensors(index, prompt)
        identity = self.identity
        text = self.tokenizer.decode(list(prompt.token_ids)) if self.tokenizer else None
        manifest = Manifest(
            name=prompt.name,
            kind=prompt.kind,
            token_ids=prompt.token_ids,
            text=text,
            model=identity.model,
            weights=identity.weights,
            tokenizer=identity.tokenizer,
            chat_template=identity.chat_template if prompt.kind == "system-prompt" else None,
            rope=identity.rope,
            config=identity.config,
            dtype=identity.dtype,
            kv_cache_dtype=identity.kv_cache_dtype,
            quantization=identity.quantization,
            layers=tuple(layers),
            engine=self._engine(),
            created=datetime.now().astimezone().isoformat(timespec="seconds"),
            checksums={},
        )
        return manifest, write_file(path, manifest, tensors, self._scratch)

    def _engine(self) -> dict[str, str]:
        from vllm.platforms import current_platform

        backend = self._config.attention_config.backend
        return {
            "vllm": metadata.version("vllm"),
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
            "vllm_relay": metadata.version("vllm-relay"),
            "device": str(current_platform.get_device_name()),
            "attention_backend": "chosen by vLLM" if backend is None else backend.name,
            "tensor_parallel_size": str(self._config.parallel_config.tensor_parallel_size),
        }


class _Progress:
    """Watches what the first worker counts: tokens and steps."""

    def __init__(self, scratch: Path, report: Callable[[str, int], None]) -> None:
        self._counts = torch.from_file(
            str(scratch / capture.PROGRESS), shared=True, size=2, dtype=torch.int64
        )
        self._report = report
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def tokens(self) -> int:
        return int(self._counts[0])

    @property
    def steps(self) -> int:
        return int(self._counts[1])

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            self._report("prefill", self.tokens)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._report("prefill", self.tokens)


@contextmanager
def scratch_folder(where: Path) -> Iterator[Path]:
    """A folder for unfinished files, on the file system of the finished ones, mode 0700.

    It is removed afterwards; what a killed build left is removed by the next one.
    """
    where.mkdir(parents=True, exist_ok=True)
    parent = os.open(where, os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)  # of two builds, neither takes the other's for left over
        for old in where.glob(_SCRATCH + "*"):
            with suppress(OSError), (old / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its build is gone
                shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=where))
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(parent)
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
