"""Small configurations of architectures whose attention layers are not all Llama's.

Weights come from `random_model.write_model`.
"""

from collections.abc import Callable
from typing import Any

import transformers

from benchmarks.harness.random_model import VOCABULARY

WINDOW = 256
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def gpt_oss() -> Any:
    """Sinks in every layer, a window in every other; experts."""
    return transformers.GptOssConfig(
        **_COMMON,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
    )


def gemma2() -> Any:
    """A soft cap in every layer, a window in every other."""
    return transformers.Gemma2Config(
        **_COMMON,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        attn_logit_softcapping=4.0,  # of logits with a deviation of about 2
    )


def gemma3() -> Any:
    """A window in three layers of four."""
    return transformers.Gemma3TextConfig(
        **_COMMON,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=128,
        query_pre_attn_scalar=128,
        sliding_window=WINDOW,
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
    )


def gemma4() -> Any:
    """Layers of 8 heads on 4 of 64 with a window, layers of 8 on 1 of 512 without."""
    return transformers.Gemma4TextConfig(
        **_COMMON,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        global_head_dim=512,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def falcon() -> Any:
    """ALiBi."""
    return transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        alibi=True,
        bias=True,
        multi_query=False,
        parallel_attn=False,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gpt-oss": gpt_oss,
    "gemma-2": gemma2,
    "gemma-3": gemma3,
    "gemma-4": gemma4,
    "falcon": falcon,
}
# Standard deviation of queries and keys where the layer's scale is not head_size ** -0.5.
PEAKS = {"gemma-4": 0.5}
