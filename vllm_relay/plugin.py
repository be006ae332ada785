"""The one place that touches vLLM's registries and the one place that patches anything.

What differs between engine versions is written here too, so that the backend reads the same for all
of them.
"""

import copy
import functools
import weakref
from typing import Any

from vllm_relay import metrics
from vllm_relay.config import CAPTURE_CONNECTOR, CONNECTOR

# The engines whose interfaces were read; a test holds pyproject.toml and README to it.
SUPPORTED = (0, 26), (0, 34)
# KV connectors of ours; neither works beside a forward pass.
IDLE_CONNECTORS = (CONNECTOR, CAPTURE_CONNECTOR)
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
        _keep_all_cores()
    elif current_platform.is_cuda():
        from vllm.platforms.cuda import CudaPlatformBase

        fall_back(CudaPlatformBase)
        _offer_flash_attention()
    _extend_worker()
    _add_connector()
    _wrap_engine_args()


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


def fall_back(platform: Any) -> None:
    """Let a model that ``RELAY`` cannot serve have the backend that vLLM would choose for it.

    Wraps ``get_attn_backend_cls``, which raises ValueError when a backend was asked for that does
    not fit (multi-head latent attention, float32, ...).
    """
    stock = platform.get_attn_backend_cls.__func__
    if getattr(stock, "_vllm_relay", False):
        return

    @functools.wraps(stock)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if getattr(selected_backend, "name", None) == BACKEND_NAME:
            try:
                return str(stock(cls, selected_backend, *args, **kwargs))
            except ValueError as error:
                metrics.say_once(f"not used: {error}; vLLM chooses a backend of its own")
                selected_backend = None
        return str(stock(cls, selected_backend, *args, **kwargs))

    get_attn_backend_cls._vllm_relay = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _offer_flash_attention() -> None:
    """Make vLLM's FlashAttention the provider "vllm" of ``vllm_relay.ops``, loaded on first use."""
    from vllm_relay.ops.attention import flash_attn, providers

    def load() -> Any:
        from vllm.v1.attention.backends import fa_utils

        version = fa_utils.get_flash_attn_version()
        return functools.partial(fa_utils.flash_attn_varlen_func, fa_version=version)

    providers.register("vllm", flash_attn.Varlen(load, block_multiple=16), ["cuda"])


def add_plain_graphs() -> None:
    """Have vLLM's runner V2 capture full CUDA graphs without relay, too; see `backend.graphs`."""
    from vllm_relay.backend import cuda_graphs as graphs

    try:
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        graphs.wrap(CudaGraphManager)
    except (ImportError, AttributeError) as error:
        # Right without it, only not as fast where nothing is shared.
        metrics.say_once(f"full CUDA graphs are captured with relay only: {error}")


def _keep_all_cores() -> None:
    """Keep vLLM's CPU engine from setting a core aside for our connector, which is idle.

    ``OMPProcessManager`` takes one more from each worker when any KV connector is configured.
    """
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    stock = OMPProcessManager.__init__
    if hasattr(stock, "_vllm_relay"):
        return

    @functools.wraps(stock)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        given = config.kv_transfer_config
        if given is not None and given.kv_connector in IDLE_CONNECTORS:
            config = copy.copy(config)
            config.kv_transfer_config = None
        stock(self, config, *args, **kwargs)

    init._vllm_relay = True  # type: ignore[attr-defined]
    OMPProcessManager.__init__ = init


def _no_backend_reason(selector: Any) -> str | None:
    """Why no relay backend class exists for these layers, or None.

    Finer limits are per layer, in the backend.
    """
    if selector.use_mla:
        return "multi-head latent attention has no relay path"
    if selector.use_sparse:
        return "sparse attention has no relay path"
    return None


def _extend_worker() -> None:
    """``llm.collective_rpc("relay_counters")``, and `worker` in the workers' processes."""
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase, "relay_counters"):
        return
    WorkerBase.relay_counters = lambda self: metrics.counters()
    stock = WorkerBase.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        global _worker
        _worker = weakref.ref(self)
        stock(self, *args, **kwargs)

    WorkerBase.__init__ = init


_worker: Any = None


def worker() -> Any:
    """This process's vLLM worker. A KV connector is not handed its worker, which has the model."""
    found = _worker and _worker()
    if found is None:
        raise RuntimeError("this process has no vLLM worker")
    return found


def _add_connector() -> None:
    """Make ``SystemKVConnector`` a name that ``--kv-transfer-config`` knows."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR, "vllm_relay.system_kv.connector", CONNECTOR
        )


def add_engine_method() -> None:
    """``relay_system_kv`` on vLLM's EngineCore, for `vllm_relay.system_kv.status`."""
    from vllm.v1.engine.core import EngineCore

    def relay_system_kv(self: Any) -> list[dict[str, Any]]:
        connector = self.scheduler.get_kv_connector()
        ours = getattr(connector, "_connectors", [connector])  # MultiConnector's children
        return [entry for c in ours if type(c).__name__ == CONNECTOR for entry in c.status()]

    EngineCore.relay_system_kv = relay_system_kv


def _wrap_engine_args() -> None:
    """Let ``system_kv`` in the settings configure its connector, and have the files checked.

    ``EngineArgs.create_engine_config`` is what every way to start an engine has in common.
    ``from_cli_args`` is the only place where the server's ``--chat-template`` can be seen.
    """
    from vllm.engine.arg_utils import EngineArgs

    stock_create, stock_from = EngineArgs.create_engine_config, EngineArgs.from_cli_args.__func__
    if hasattr(stock_create, "_vllm_relay"):
        return

    @functools.wraps(stock_create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_relay.system_kv import settings

        settings.configure(self)
        config = stock_create(self, *args, **kwargs)
        # One of several API servers starts no engine; the process above them has checked.
        if getattr(self, "_api_process_rank", 0) < 0 or self._api_process_count == 1:
            settings.admit(config, getattr(self, "_relay_chat_template", None))
        return config

    @functools.wraps(stock_from)
    def from_cli_args(cls: Any, args: Any) -> Any:
        engine_args = stock_from(cls, args)
        engine_args._relay_chat_template = getattr(args, "chat_template", None)
        return engine_args

    create_engine_config._vllm_relay = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
    EngineArgs.from_cli_args = classmethod(from_cli_args)
