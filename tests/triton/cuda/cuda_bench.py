"""A CUDA backend on CPU tensors: the real config, layers and builder, `reference_flash` kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from benchmarks.harness.random_model import write_random_model
from vllm_relay.backend import cuda, cuda_impl

BLOCK = 16
BLOCKS = 96
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
MAX_ROWS, MAX_LEN = 12, 240
COLUMNS = MAX_LEN // BLOCK + 2
FP8 = torch.float8_e4m3fn


def make_config(folder: Path, graphs: str = "FULL_AND_PIECEWISE", **relay: Any) -> VllmConfig:
    """The engine's own, for a CUDA graph mode that its CPU platform would switch off."""
    model = folder / "model"
    if not model.exists():
        write_random_model(model, HEADS, KV_HEADS, HEAD_SIZE)
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_ROWS,
        additional_config={"relay": {"min_saved_tokens": 0, **relay}},
    ).create_engine_config()
    config.cache_config.block_size = BLOCK
    config.compilation_config.cudagraph_mode = CUDAGraphMode[graphs]
    config.compilation_config.max_cudagraph_capture_size = MAX_ROWS
    return config


@dataclass
class Step:
    """One batch: rows of (block ids, tokens with this step's queries, queries)."""

    rows: list[tuple[list[int], int, int]]
    padded_rows: int = 0
    tokens: int = 0  # with padding; 0: of `padded_rows` rows of the longest

    def common(self, buffers: "Buffers") -> CommonAttentionMetadata:
        """Written into persistent buffers, as a runner does: graphs replay with their addresses."""
        count = max(len(self.rows), self.padded_rows)
        queries = [n for _, _, n in self.rows]
        starts = np.concatenate([[0], np.cumsum(queries)])
        width = max(queries, default=1)
        buffers.table.fill_(BLOCKS - 1)  # what is not a row's own is stale
        buffers.starts.fill_(int(starts[-1]))
        buffers.lens.zero_()
        for row, (blocks, length, _) in enumerate(self.rows):
            buffers.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            buffers.lens[row] = length
        buffers.table[len(self.rows) :] = 0
        buffers.starts[: len(starts)] = torch.from_numpy(starts)
        return CommonAttentionMetadata(
            query_start_loc=buffers.starts[: count + 1],
            query_start_loc_cpu=buffers.starts[: count + 1].clone(),
            seq_lens=buffers.lens[:count],
            num_reqs=count,
            num_actual_tokens=self.tokens or max(int(starts[-1]), self.padded_rows * width),
            max_query_len=width,
            max_seq_len=MAX_LEN,
            block_table_tensor=buffers.table[:count],
            slot_mapping=torch.empty(0, dtype=torch.int64),
            causal=True,
        )


class Buffers:
    """What a runner keeps over all steps."""

    def __init__(self) -> None:
        self.table = torch.zeros(MAX_ROWS, COLUMNS, dtype=torch.int32)
        self.starts = torch.zeros(MAX_ROWS + 1, dtype=torch.int32)
        self.lens = torch.zeros(MAX_ROWS, dtype=torch.int32)


class Bench:
    """Two layers of one KV cache group, a builder for them, a cache full of random KV.

    Args:
        load_drafts: adds a draft model's layers by calling what it is given, once for each.
    """

    def __init__(
        self,
        config: VllmConfig,
        layers: int = 2,
        load_drafts: Callable[[Callable[[], None]], None] | None = None,
        **attention: Any,
    ) -> None:
        self.config, self.buffers = config, Buffers()
        backend = cuda.RelayBackend
        self.layers: list[Any] = []

        def add_layer() -> None:
            self.layers.append(
                Attention(
                    HEADS,
                    HEAD_SIZE,
                    HEAD_SIZE**-0.5,
                    KV_HEADS,
                    cache_config=config.cache_config,
                    prefix=f"model.layers.{len(self.layers)}.self_attn.attn",
                    attn_backend=backend,
                    **attention,
                )
            )

        with set_current_vllm_config(config):
            for _ in range(layers):
                add_layer()
            if load_drafts is not None:
                load_drafts(add_layer)
            self.spec = FullAttentionSpec(
                block_size=BLOCK,
                num_kv_heads=KV_HEADS,
                head_size=HEAD_SIZE,
                dtype=torch.uint8 if config.cache_config.cache_dtype == "fp8" else torch.float32,
                sliding_window=attention.get("per_layer_sliding_window"),
            )
            self.builder = self.make_builder(self.layers)
        generator = torch.Generator().manual_seed(0)
        shape = (BLOCKS, BLOCK, KV_HEADS, 2 * HEAD_SIZE)
        # NHD in memory, as vLLM's default on CUDA
        self.set_cache((torch.randn(shape, generator=generator) * 1.4).transpose(1, 2))
        self.cache[0] = torch.nan  # the null block
        if config.cache_config.cache_dtype == "fp8":
            for layer in self.layers:
                layer._q_scale.fill_(0.5), layer._v_scale.fill_(0.5)
                layer._k_scale = torch.tensor([0.25, 0.5])  # per head
            self.set_cache((self.cache * 4).to(FP8).view(torch.uint8))

    def make_builder(self, layers: Sequence[Any]) -> cuda.RelayMetadataBuilder:
        names = [layer.layer_name for layer in layers]
        builder = cuda.RelayBackend.get_builder_cls()
        return builder(self.spec, names, self.config, torch.device("cpu"))

    def set_cache(self, cache: Tensor) -> None:
        self.cache = cache
        for layer in self.layers:
            layer.kv_cache = cache

    def build(self, step: Step, *, capture: bool = False) -> Any:
        common = step.common(self.buffers)
        if capture:
            return self.builder.build_for_cudagraph_capture(common)
        return self.builder.build(0, common)

    def queries(self, tokens: int, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, HEADS, HEAD_SIZE, generator=generator) * 1.4

    def given(self, q: Tensor) -> Tensor:
        """The queries as the layer gives them to its kernels."""
        return (q * 2).to(FP8) if self.config.cache_config.cache_dtype == "fp8" else q

    def forward(self, metadata: Any, q: Tensor, layer: int = 0) -> Tensor:
        """What the layer writes; tokens that it leaves alone are NaN."""
        out = torch.full_like(q, torch.nan)
        attention = self.layers[layer]
        q = self.given(q)
        return attention.impl.forward(attention, q, q, q, self.cache, metadata, out)

    def stock(self, step: Step, q: Tensor, layer: int = 0) -> Tensor:
        """The same from vLLM's own builder and forward."""
        common = step.common(self.buffers)
        metadata = stock_metadata(self.builder, common)
        out = torch.full_like(q, torch.nan)
        attention = self.layers[layer]
        q = self.given(q)
        FlashAttentionImpl.forward(attention.impl, attention, q, q, q, self.cache, metadata, out)
        return out


def stock_metadata(builder: Any, common: CommonAttentionMetadata) -> Any:
    """vLLM's own metadata of a step, from vLLM's own builder with a buffer of its own."""
    return FlashAttentionMetadataBuilder.build(cuda_impl.copy_builder(builder), 0, common)


def random_step(rng: np.random.Generator, queries: int = 1, padded: int = 0) -> Step:
    """Groups of rows over the same leading blocks, in any order, some alone; at least two rows."""
    count = int(rng.integers(2, (padded or MAX_ROWS) + 1))
    trunks = [rng.permutation(np.arange(1, 60))[: rng.integers(1, 12)] for _ in range(3)]
    rows, fresh = [], 60
    for _ in range(count):
        trunk = trunks[rng.integers(3)].tolist() if rng.random() < 0.75 else []
        trunk = trunk[: rng.integers(1, len(trunk) + 1)] if trunk and rng.random() < 0.3 else trunk
        own = int(rng.integers(1, 3))
        blocks = [*trunk, *range(fresh, fresh + own)]
        fresh += own
        low = max(queries, len(trunk) * BLOCK + 1 if rng.random() < 0.8 else queries)
        length = int(rng.integers(low, len(blocks) * BLOCK + 1))
        rows.append((blocks, length, queries))
    return Step(rows, padded)
