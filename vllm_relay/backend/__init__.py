"""vLLM's attention backend ``RELAY``: thin classes over vLLM's own backend of the platform."""

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm_relay.backend.cpu import RelayBackend
elif current_platform.is_cuda():
    from vllm_relay.backend.cuda import RelayBackend
else:
    raise ImportError(
        f"vllm-relay has no relay backend for {current_platform.device_name!r}: "
        "it runs on vLLM's CPU engine and on NVIDIA GPUs"
    )

__all__ = ["RelayBackend"]
