"""The mathematics of relay attention: tensors in, tensors out.

Needs torch only. Importing this package loads neither vLLM nor Triton, so it can be read, tested
and used alone. Every op checks its arguments, then picks who computes it by device.
"""

from vllm_relay.ops.attention import providers
from vllm_relay.ops.attention.op import context_attention, system_attention
from vllm_relay.ops.fusion.op import relay_fusion
from vllm_relay.ops.relay import relay_attention
from vllm_relay.ops.shared_cache import SharedCache

__all__ = [
    "SharedCache",
    "context_attention",
    "providers",
    "relay_attention",
    "relay_fusion",
    "system_attention",
]
