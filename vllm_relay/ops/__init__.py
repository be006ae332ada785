"""The mathematics of relay attention: tensors in, tensors out.

Needs torch only: importing this package loads neither vLLM nor Triton, so it can be read, tested
and used alone. Every op checks its arguments, then picks a provider by device.
"""

from vllm_relay.ops.context import context_attention
from vllm_relay.ops.fusion import relay_fusion
from vllm_relay.ops.relay import relay_attention
from vllm_relay.ops.shared_cache import SharedCache
from vllm_relay.ops.system import system_attention

__all__ = [
    "SharedCache",
    "context_attention",
    "relay_attention",
    "relay_fusion",
    "system_attention",
]
