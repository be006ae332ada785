"""Models without weights: the shapes of real ones for ``load_format="dummy"``."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.timing import Ceilings, DecodeStep

# https://huggingface.co/meta-llama: config.json of each
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "rope_theta": 10000.0,
    },
}
# Longer than either model was made for: only the shape counts here.
MAX_POSITIONS = 16384


def write_config(folder: Path, name: str) -> Path:
    """Write the ``config.json`` of one of `SHAPES`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[name],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def roofline_tok_s(model: str, case: dict[str, Any], ceilings: Ceilings) -> float:
    """Tokens per second if a step took max(bytes / bandwidth, FLOPs / rate): weights and KV read
    once, the matrix products of the layers and of the output."""
    shape = SHAPES[model]
    hidden, heads, kv_heads = (
        shape[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    attention = hidden * 128 * (2 * heads + 2 * kv_heads)
    layers = shape["num_hidden_layers"]
    weights = layers * (attention + 3 * hidden * shape["intermediate_size"])
    weights += hidden * shape["vocab_size"]
    middle = case["own"] + case["settle"] + case["windows"] * case["steps"] // 2
    step = DecodeStep(case["batch"], case["shared"], middle, heads, kv_heads)
    moved = 2 * weights + layers * step.bytes
    work = 2 * weights * case["batch"] + layers * step.flops
    return case["batch"] / max(moved / ceilings.bandwidth, work / ceilings.matmul)
