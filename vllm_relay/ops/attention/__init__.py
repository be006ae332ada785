"""System and context attention: the two ops, and one module per provider of both."""

from vllm_relay.ops.attention.op import context_attention, system_attention

__all__ = ["context_attention", "system_attention"]
