"""Offline system KVs: a prompt's KV computed once, kept in a file, loaded at start and pinned."""

from typing import Any


def status(engine: Any) -> list[dict[str, Any]]:
    """The system KVs of a running engine.

    Args:
        engine: vLLM's LLM or LLMEngine. For an AsyncLLM: ``await
            engine.engine_core.call_utility_async("relay_system_kv")``. See also ``/metrics``.

    Returns:
        One dictionary per prompt: ``name``, ``path``; ``tokens`` of the file; ``blocks``,
        ``tokens_pinned`` and ``block_ids`` in the KV cache; ``cached``, True if requests find them
        (from the first request on); ``requests_hit`` and ``tokens_hit`` since the start;
        ``released``, the reason why they were given up, or None.
    """
    core = getattr(engine, "llm_engine", engine).engine_core
    if hasattr(core, "call_utility"):
        return list(core.call_utility("relay_system_kv"))
    return list(core.engine_core.relay_system_kv())  # the engine in this process
