"""Small configurations of model architectures. Weights come from `random_model.write_model`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers

from benchmarks.harness.random_model import PEAK, VOCABULARY

WINDOW = 256
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
GQA = {"num_attention_heads": 8, "num_key_value_heads": 2}
SLIDING = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A small model of one architecture.

    Attributes:
        config: class of transformers. layers: what is particular to its attention layers.
        given: arguments of the class beyond those that most have in common. drop: of those in
            common, what it does not take.
        peak: standard deviation of queries and keys, before the layer's scale.
    """

    config: str
    layers: str = "full attention"
    given: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    peak: float = PEAK

    def __call__(self) -> Any:
        """The configuration."""
        common = {**WIDTH, **GQA, "head_dim": 64, **TOKENS}
        common = {name: value for name, value in common.items() if name not in self.drop}
        return getattr(transformers, self.config)(**common | dict(self.given))


def _of_heads(heads: int, kv_heads: int, head_size: int) -> dict[str, int]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(config="LlamaConfig", given={"tie_word_embeddings": False}),
    "qwen-2": Architecture(config="Qwen2Config", layers="biases"),
    "qwen-3": Architecture(config="Qwen3Config", layers="norms of queries and keys"),
    "qwen-3-moe": Architecture(config="Qwen3MoeConfig", layers="experts", given=EXPERTS),
    "qwen-3-next": Architecture(
        config="Qwen3NextConfig",
        layers="gated delta net in every other layer",
        given={
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "shared_expert_intermediate_size": 128,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "mistral": Architecture(
        config="MistralConfig", layers="a window in every layer", given={"sliding_window": WINDOW}
    ),
    "mixtral": Architecture(
        config="MixtralConfig", layers="experts", given={"num_local_experts": 4}
    ),
    "phi-3": Architecture(config="Phi3Config", layers="queries, keys and values in one product"),
    "olmo-2": Architecture(config="Olmo2Config", layers="norms after attention"),
    "olmo-3": Architecture(
        config="Olmo3Config",
        layers="a window in every other layer",
        given={"sliding_window": WINDOW, "layer_types": SLIDING},
    ),
    "olmoe": Architecture(
        config="OlmoeConfig", layers="experts", given={"num_experts": 4, "num_experts_per_tok": 2}
    ),
    "gemma-2": Architecture(
        config="Gemma2Config",
        layers="a soft cap in every layer, a window in every other",
        given={
            **_of_heads(8, 4, 64),
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 4.0,  # of logits with a deviation of about 2
        },
    ),
    "gemma-3": Architecture(
        config="Gemma3TextConfig",
        layers="a window in three layers of four",
        given={
            **_of_heads(4, 1, 128),
            "query_pre_attn_scalar": 128,
            "sliding_window": WINDOW,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "gemma-3n": Architecture(
        config="Gemma3nTextConfig",
        layers="a window in every other layer; two layers read the KV of others",
        given={
            "sliding_window": WINDOW,
            "layer_types": SLIDING,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "intermediate_size": [512] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma-4": Architecture(
        config="Gemma4TextConfig",
        layers="8 heads on 4 of 64 with a window, 8 on 1 of 512 without",
        given={
            **_of_heads(8, 4, 64),
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": WINDOW,
            "layer_types": SLIDING,
        },
        peak=0.5,  # the layer's scale is 1
    ),
    "paligemma": Architecture(
        config="PaliGemmaConfig",
        layers="full attention behind images; requests of text",
        given={
            "text_config": {**WIDTH, **GQA, "head_dim": 64, **TOKENS, "model_type": "gemma"},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_index": VOCABULARY - 1,
            "projection_dim": 256,
        },
        drop=(*WIDTH, *GQA, "head_dim"),
    ),
    "gpt-oss": Architecture(
        config="GptOssConfig",
        layers="sinks in every layer, a window in every other; experts",
        given={
            "intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
        },
    ),
    "cohere-2": Architecture(
        config="Cohere2Config",
        layers="a window in every other layer, which alone has positions",
        given={"sliding_window": WINDOW, "layer_types": SLIDING},
    ),
    "granite": Architecture(
        config="GraniteConfig", layers="a scale of its own", given={"attention_multiplier": 0.125}
    ),
    "granite-4": Architecture(
        config="GraniteMoeHybridConfig",
        layers="Mamba in three layers of four; experts",
        given={
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "attention_multiplier": 0.125,
        },
    ),
    "falcon-h1": Architecture(
        config="FalconH1Config",
        layers="Mamba beside attention in every layer",
        given={
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_ssm": 512,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
    "nemotron-h": Architecture(
        config="NemotronHConfig",
        layers="Mamba in two layers of four",
        given={
            "hybrid_override_pattern": "M*M-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
    ),
    "lfm-2": Architecture(
        config="Lfm2Config",
        layers="short convolutions in two layers of four",
        given={"layer_types": ["conv", "full_attention"] * 2, "conv_dim": 256, "block_dim": 256},
        drop=("head_dim",),
    ),
    "llama-4": Architecture(
        config="Llama4TextConfig",
        layers="chunks in three layers of four; experts",
        given={
            "intermediate_size_mlp": 512,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 512,
            "interleave_moe_layer_step": 2,
        },
    ),
    "deepseek-v2": Architecture(
        config="DeepseekV2Config",
        layers="multi-head latent attention; experts",
        given={
            "num_key_value_heads": 8,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,  # with 64 the one head size that the engine has
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
        },
        drop=("head_dim",),
    ),
    "starcoder-2": Architecture(config="Starcoder2Config", layers="biases", drop=("head_dim",)),
    "glm-4": Architecture(config="Glm4Config", layers="norms around attention"),
    "glm-4-moe": Architecture(
        config="Glm4MoeConfig",
        layers="experts",
        given={
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
        },
    ),
    "exaone-4": Architecture(
        config="Exaone4Config",
        layers="a window in three layers of four",
        given={"sliding_window": WINDOW, "sliding_window_pattern": 4},
    ),
    "stablelm": Architecture(
        config="StableLmConfig", layers="rotary positions in a quarter", drop=("head_dim",)
    ),
    "opt": Architecture(
        config="OPTConfig",
        layers="learnt positions",
        given={"ffn_dim": 512, "word_embed_proj_dim": 256},
        drop=("head_dim", "num_key_value_heads", "intermediate_size"),
    ),
    "bloom": Architecture(
        config="BloomConfig",
        layers="ALiBi",
        given={"n_layer": 4, "n_head": 4},
        drop=("head_dim", *GQA, "num_hidden_layers", "intermediate_size"),
    ),
    "falcon": Architecture(
        config="FalconConfig",
        layers="ALiBi",
        given={
            "num_attention_heads": 4,
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
            "tie_word_embeddings": False,
        },
        drop=("head_dim", "num_key_value_heads", "intermediate_size"),
    ),
}
