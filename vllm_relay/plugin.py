"""The one place that touches vLLM's registries and the one place that patches anything.

What differs between engine versions is written here too, so that the backend reads the same for all
of them.
"""

import functools
from typing import Any

from vllm_relay import metrics

# The engines whose interfaces were read; a test holds pyproject.toml and README to it.
SUPPORTED = (0, 26), (0, 34)
BACKEND_NAME = "RELAY"
BACKEND_PATH = "vllm_relay.backend.RelayBackend"


def register() -> None:
    """Add ``RELAY`` to vLLM's attention backends and let the CPU platform honour it. Idempotent.

    Raises:
        RuntimeError: vLLM is outside `SUPPORTED`.
    """
    check_engine_version()
    backend_member()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _honour_backend_on_cpu()
    _add_worker_method()


def check_engine_version(version: str | None = None) -> None:
    """Raise RuntimeError unless ``version``, by default vLLM's, is in `SUPPORTED`."""
    if version is None:
        import vllm.version

        version = str(vllm.version.__version__)
    low, high = SUPPORTED
    parts = version.split("+")[0].split(".")
    try:
        found = int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise RuntimeError(_range_error(version)) from None
    if not low <= found < high:
        raise RuntimeError(_range_error(version))


def _range_error(version: str) -> str:
    (lo, hi), (lo2, hi2) = SUPPORTED
    return (
        f"vllm-relay supports vLLM >= {lo}.{hi}, < {lo2}.{hi2}; found {version}. "
        "Install a matching pair, or start vLLM without this plugin: VLLM_PLUGINS=''."
    )


def backend_member() -> Any:
    """The enum member ``AttentionBackendEnum.RELAY``; registers it on first use in this process.

    It is also what an unpickled config calls: a spawned engine process reads its config before vLLM
    loads plugins there, and an enum member is otherwise pickled by its value, which that process
    does not know yet.
    """
    from vllm.v1.attention.backends import registry

    enum = registry.AttentionBackendEnum
    member = enum._member_map_.get(BACKEND_NAME)
    if member is None:
        if hasattr(enum, "register"):  # vLLM >= 0.32
            registry.register_backend(BACKEND_NAME, BACKEND_PATH)
            member = enum[BACKEND_NAME]
        else:
            member = _add_member(enum, BACKEND_NAME, BACKEND_PATH)
    # On the instance, so that the members of vLLM itself are pickled as ever.
    member.__reduce_ex__ = lambda protocol: (backend_member, ())
    return member


def _add_member(enum: Any, name: str, value: str) -> Any:
    """Add a member to an Enum class that has members (vLLM 0.26-0.31 offer no way to)."""
    member = object.__new__(enum)
    member._name_ = name
    member._value_ = value
    setattr(enum, name, member)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    enum._member_names_.append(name)
    return member


def _honour_backend_on_cpu() -> None:
    """Wrap ``CpuPlatform.get_attn_backend_cls``, which returns CPU_ATTN whatever was selected.

    Not needed once patches/0001 is upstream; harmless then.
    """
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.get_attn_backend_cls.__func__
    if getattr(stock, "_vllm_relay", False):
        return

    @functools.wraps(stock)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if getattr(selected_backend, "name", None) == BACKEND_NAME:
            reason = _no_backend_reason(attn_selector_config)
            if reason is None:
                return str(selected_backend.get_path())
            metrics.say_once(f"not used: {reason}; vLLM's own backend serves this model")
            selected_backend = None
        return str(stock(cls, selected_backend, attn_selector_config, *args, **kwargs))

    get_attn_backend_cls._vllm_relay = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _no_backend_reason(selector: Any) -> str | None:
    """Why no relay backend class exists for these layers, or None.

    Finer limits are per layer, in the backend.
    """
    if selector.use_mla:
        return "multi-head latent attention has no relay path"
    if selector.use_sparse:
        return "sparse attention has no relay path"
    return None


def _add_worker_method() -> None:
    """``llm.collective_rpc("relay_counters")``: how to reach the counters of the workers."""
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.relay_counters = lambda self: metrics.counters()
