"""Out-of-tree backends for the child processes: vLLM's own CPU attention under other names."""

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


class TinyBackend(CPUAttentionBackend):
    """Accepts what CPU_ATTN accepts."""

    @staticmethod
    def get_name() -> str:
        return "TINY"


class PickyBackend(TinyBackend):
    """Rejects every usual head size."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [7]
