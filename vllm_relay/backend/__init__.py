"""vLLM's attention backend ``RELAY``: thin classes over vLLM's own backend of the platform.

``RelayBackend`` is imported when it is asked for: a part of the package needs no backend.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """`RelayBackend` of the platform. ImportError: relay has none for it."""
    if name != "RelayBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_relay.backend import cpu

        return cpu.RelayBackend
    if current_platform.is_cuda():
        from vllm_relay.backend import cuda

        return cuda.RelayBackend
    raise ImportError(
        f"vllm-relay has no relay backend for {current_platform.device_name!r}: "
        "it runs on vLLM's CPU engine and on NVIDIA GPUs"
    )
