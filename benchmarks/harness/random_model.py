"""Small Llama models with random weights of realistic scale: attention is peaked and moves the
output.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 2048
LAYERS = 4
# Standard deviation of queries and keys; attention logits then have about its square.
_PEAK = 1.5
# Standard deviation of the output logits.
_SHARP = 3.0


def write_random_model(
    folder: Path, num_heads: int, num_kv_heads: int, head_size: int, seed: int = 0
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` (bf16); returns the folder.

    Same arguments, same weights.
    """
    hidden, intermediate = num_heads * head_size, 2 * num_heads * head_size
    generator = torch.Generator().manual_seed(1000 * seed + head_size)

    def weight(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale / columns**0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": weight(VOCABULARY, hidden, _SHARP),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{layer}.post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{layer}.self_attn.q_proj.weight": weight(hidden, hidden, _PEAK),
            f"{layer}.self_attn.k_proj.weight": weight(num_kv_heads * head_size, hidden, _PEAK),
            f"{layer}.self_attn.v_proj.weight": weight(num_kv_heads * head_size, hidden),
            f"{layer}.self_attn.o_proj.weight": weight(hidden, hidden, 2.0),
            f"{layer}.mlp.gate_proj.weight": weight(intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": weight(intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": weight(hidden, intermediate),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": 32768,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
