"""Relay fusion: the op, and its kernels per device."""

from vllm_relay.ops.fusion.op import relay_fusion

__all__ = ["relay_fusion"]
