"""Small models of real architectures with random weights of realistic scale: attention is peaked
and moves the output.
"""

import re
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 2048
LAYERS = 4
# Standard deviation of queries and keys; attention logits then have about its square.
PEAK = 1.5
# Standard deviation of the output logits.
_SHARP = 3.0
# Standard deviation of embeddings that are tied to the output, times that of a unit row: with more
# of it, every token predicts itself.
_TIED = 0.3
_QUERIES_AND_KEYS = re.compile(r"(q_proj|k_proj|query_key_value)\.weight")
_OUTPUT = re.compile(r"(o_proj|self_attention\.dense)\.weight")


def write_model(folder: Path, config: Any, seed: int = 0, peak: float = PEAK) -> Path:
    """Write ``config.json`` and ``model.safetensors`` (bf16); returns the folder.

    Same arguments, same weights.

    Args:
        config: of a model that writes text, from transformers.
        peak: standard deviation of queries and keys, before the layer's scale.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(seed)
    images = hasattr(config, "vision_config")
    kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # whatever is left as the class initialises it
        model = kind.from_config(config, dtype=torch.bfloat16)
    tied = getattr(config, "tie_word_embeddings", False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith(("bias", "sinks")):
            # The weight of a norm is 1, or it is 0 and added to 1.
            if re.search(r"[qk]_norm\.weight", name):
                parameter.data += peak - 1
            elif tied and name.endswith("model.norm.weight"):
                parameter.data += _SHARP / _TIED - 1
            continue
        scale = parameter.shape[-1] ** -0.5
        if "lm_head" in name:
            scale *= _SHARP
        elif "embed" in name:
            scale = _TIED * scale if tied else 1.0
        elif _QUERIES_AND_KEYS.search(name):
            scale *= peak
        elif _OUTPUT.search(name):
            scale *= 2.0
        elif name.endswith("bias"):
            scale = 0.1
        elif name.endswith("sinks"):
            scale = 1.0
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(values * scale)
    model.save_pretrained(folder)
    return folder


def write_random_model(
    folder: Path,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    seed: int = 0,
    *,
    layers: int = LAYERS,
    width: int | None = None,
) -> Path:
    """`write_model` of a Llama with these heads, as wide as its queries unless told otherwise."""
    from transformers import LlamaConfig

    width = width or num_heads * head_size
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_size,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return write_model(folder, config, 1000 * seed + head_size)
