"""The writer puts each layer's tokens into the blocks of its group, and nothing elsewhere."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.system_kv.files import small_manifest, small_tensors, write
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.manifest import Layer
from vllm_relay.system_kv.placement import CacheGroup, place
from vllm_relay.system_kv.writer import Writer

FULL, WINDOWED = (Layer(f"model.layers.{i}.self_attn.attn", 2, 4) for i in range(2))
GROUPS = [
    CacheGroup(block_size=4, window=None, layers=(FULL.name,)),
    CacheGroup(block_size=2, window=4, layers=(WINDOWED.name,)),
]
TOKENS = tuple(range(3, 17))  # 12 of 14 in blocks; under the window tokens 8 to 11 of them


class Attention:
    """A layer with a KV cache of rows by slot; what packs its blocks is noted."""

    def __init__(self, layer: Layer) -> None:
        self.num_kv_heads, self.head_size = layer.kv_heads, layer.head_size
        self._k_scale_float = self._v_scale_float = 1.0
        self.impl, self.kept = self, []
        self.kv_cache = torch.zeros(2, 64, layer.kv_heads, layer.head_size)

    def do_kv_cache_update(self, layer: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        cache[0, slots], cache[1, slots] = k, v

    def keep(self, layer: Any, cache: Any, block_ids: tuple[int, ...]) -> None:
        self.kept.append(block_ids)


def written(folder: Path, first_token: int) -> tuple[dict[str, Attention], SystemKVFile]:
    """The layers after a file has been written, whose windowed layer begins at a token."""
    layers = FULL, replace(WINDOWED, first_token=first_token)
    manifest = small_manifest(token_ids=TOKENS, layers=layers, dtype="float32")
    write(folder / "acme.relay", manifest, small_tensors(manifest))
    file = SystemKVFile(folder / "acme.relay")
    context = {layer.name: Attention(layer) for layer in layers}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=1),
        compilation_config=SimpleNamespace(static_forward_context=context),
    )
    placements = place([file.manifest.token_ids], GROUPS, [None])
    Writer(config, [file], placements, GROUPS).write()
    return context, file


@pytest.mark.parametrize("first_token", [0, 5, 8])
def test_each_group_gets_the_tokens_of_its_own_blocks(first_token: int, tmp_path: Path) -> None:
    context, file = written(tmp_path, first_token)
    # Blocks 1 to 3 of 4 tokens; then, of 2 tokens each, 4 and 5.
    for layer, begin, slots in ((FULL, 0, range(4, 16)), (WINDOWED, 8, range(8, 12))):
        for cache, whole in zip(
            context[layer.name].kv_cache, file.tensors(layer.name), strict=True
        ):
            expected = torch.zeros_like(cache)
            tensor = whole[begin - (first_token if begin else 0) :][: len(slots)]
            expected[list(slots)] = tensor
            assert torch.equal(cache, expected)
    # Segments under a window are read in place.
    assert context[FULL.name].kept == [(1, 2, 3)] and context[WINDOWED.name].kept == []


def test_a_file_that_begins_behind_the_first_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemKVError) as caught:
        written(tmp_path, 9)
    assert str(caught.value) == (
        f"{tmp_path / 'acme.relay'}: layer {WINDOWED.name} begins at token 9, this engine's KV "
        "blocks at 8: build it with --block-size 4"
    )
