"""Every patch of vLLM and every branch on its version.

No other module assigns to a vLLM class or module. Each patch says why it exists, what upstream has
about it ("none" is as of vLLM 0.33), and when to remove it. A target that has moved raises
`TargetMoved` with its name. "From 0.32 on" means: when `SUPPORTED` starts at 0.32.
"""

import copy
import importlib
import inspect
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_relay import metrics
from vllm_relay.config import BACKEND_NAME, CAPTURE_CONNECTOR, CONNECTOR, configured, is_asked_for
from vllm_relay.patching import swapped, target, wrap

if TYPE_CHECKING:
    from vllm_relay.backend.cuda_graphs import FullGraphs

# First engine version accepted, first one refused; a test holds pyproject.toml to it.
SUPPORTED = (0, 26), (0, 34)
BACKEND_PATH = "vllm_relay.backend.RelayBackend"


def unsupported(version: str | None = None) -> str | None:
    """Why ``version``, by default vLLM's, is not in `SUPPORTED`, or None."""
    version = version or str(target("vllm.version:__version__"))
    low, high = SUPPORTED
    with suppress(ValueError):
        if low <= tuple(map(int, version.split("+")[0].split(".")[:2])) < high:
            return None
    return f"it supports vLLM >= {low[0]}.{low[1]}, < {high[0]}.{high[1]}; found {version}"


def backend_member() -> Any:
    """The enum member ``AttentionBackendEnum.RELAY``; registers it on first use in this process.

    Why: a spawned engine unpickles its config before vLLM loads plugins there. A member is pickled
    by value, which that process does not know yet; ours is pickled as a call of this function.
    Upstream: patches/0002; by name: vllm-project/vllm#41091. Remove when: all of `SUPPORTED` has
    patches/0002; the last branch: from 0.32 on.
    """
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    enum = registry.AttentionBackendEnum
    if BACKEND_NAME not in enum._member_map_:
        if hasattr(enum, "register"):
            registry.register_backend(BACKEND_NAME, BACKEND_PATH)
        else:  # before 0.32
            new = object.__new__(enum)
            new._name_, new._value_ = BACKEND_NAME, BACKEND_PATH
            setattr(enum, BACKEND_NAME, new)
            enum._member_map_[BACKEND_NAME] = enum._value2member_map_[BACKEND_PATH] = new
            enum._member_names_.append(BACKEND_NAME)
    member = enum[BACKEND_NAME]
    # On the member, so that vLLM's own members are pickled as before.
    member.__reduce_ex__ = lambda protocol: (backend_member, ())
    return member


def withdraw_backend() -> None:
    """Take ``RELAY`` out of vLLM's backends: asking for it is vLLM's own error then."""
    enum = target("vllm.v1.attention.backends.registry:AttentionBackendEnum")
    if member := enum._member_map_.pop(BACKEND_NAME, None):
        enum._value2member_map_.pop(member.value, None)
        enum._member_names_.remove(BACKEND_NAME)
        type.__delattr__(enum, BACKEND_NAME)


def honour_backend_on_cpu() -> None:
    """Let ``--attention-backend relay`` select our backend on the CPU platform.

    Why: ``CpuPlatform.get_attn_backend_cls`` returns CPU_ATTN whatever backend was selected.
    Upstream: patches/0001; vllm-project/vllm#24794 gave CUDA the check that CPUs lack.
    Remove when: all of `SUPPORTED` has patches/0001, and `RelayBackend` declares what it accepts.
    """

    @wrap(target("vllm.platforms.cpu:CpuPlatform"), "get_attn_backend_cls")
    def choose(
        stock: Any, cls: Any, selected_backend: Any, attn_selector_config: Any, *a: Any, **kw: Any
    ) -> str:
        config = attn_selector_config
        if getattr(selected_backend, "name", None) == BACKEND_NAME:
            if not config.use_mla and not config.use_sparse:
                return str(selected_backend.get_path())
            kind = "multi-head latent" if config.use_mla else "sparse"
            reason = f"{kind} attention has no relay path"
            metrics.say_once(f"not used: {reason}; vLLM's own backend serves this model")
            selected_backend = None
        return str(stock(cls, selected_backend, config, *a, **kw))


def fall_back_on_cuda() -> None:
    """Serve a model that ``RELAY`` does not support by the backend that vLLM would choose.

    Why: where it does not fit (MLA, float32, ...), it is a ValueError, and no engine starts.
    Upstream: intended there, vllm-project/vllm#27424. Remove when: a backend can be preferred only.
    """

    @wrap(target("vllm.platforms.cuda:CudaPlatformBase"), "get_attn_backend_cls")
    def choose(stock: Any, cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if getattr(selected_backend, "name", None) == BACKEND_NAME:
            try:
                return str(stock(cls, selected_backend, *args, **kwargs))
            except ValueError as error:
                metrics.say_once(f"not used: {error}; vLLM chooses a backend of its own")
                selected_backend = None
        return str(stock(cls, selected_backend, *args, **kwargs))


def keep_all_cores() -> None:
    """Leave all CPU cores to the engine when the only KV connector is ours.

    Why: vLLM reserves one core per worker for any KV connector; ours is idle in forward passes.
    Upstream: vllm-project/vllm#32365, #36487. Remove when: a connector can decline the core.
    """

    @wrap(target("vllm.utils.ompmultiprocessing:OMPProcessManager"), "__init__")
    def init(stock: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        given = getattr(config.kv_transfer_config, "kv_connector", None)
        if given in (CONNECTOR, CAPTURE_CONNECTOR):
            config = copy.copy(config)
            config.kv_transfer_config = None
        stock(self, config, *args, **kwargs)


def capture_plain_graphs(graphs: "FullGraphs") -> None:
    """Capture full CUDA graphs with relay of runner V2 without it, too; choose at replay.

    Why: a graph cannot know what its batches share; kernels that return at once cost microseconds.
    Upstream: none. Remove when: a builder can add a variant to ``BatchExecutionDescriptor``.
    """
    manager = target("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager")

    @wrap(manager, "run_fullgraph")
    def run(stock: Any, self: Any, desc: Any, *args: Any, **kwargs: Any) -> Any:
        plain = getattr(self, "_relay_plain_graphs", {})
        if desc not in plain or graphs.relayed():
            return stock(self, desc, *args, **kwargs)
        with swapped(self, graphs=plain):
            return stock(self, desc, *args, **kwargs)

    @wrap(manager, "capture")
    def capture(stock: Any, self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._relay_plain_graphs = {}
        result = stock(self, graphs.watched(create_forward_fn), *args, **kwargs)
        full = next((mode for mode in self._capture_descs if mode.name == "FULL"), None)
        again = [desc for desc in self._capture_descs.get(full, ()) if desc in graphs.with_relay]
        # vLLM captures some graphs to measure their memory, and counts them (from 0.32 on).
        if full is None or getattr(self, "_max_full_descs_to_capture", None) is not None:
            return result
        with graphs.capture_plain(), swapped(self, graphs={}, _capture_descs={full: again}):
            if again:
                stock(self, create_forward_fn, *args, **kwargs)
            self._relay_plain_graphs = self.graphs
        return result


_worker: Any = None


def extend_worker(started: Callable[[Any], None]) -> None:
    """Add ``llm.collective_rpc("relay_counters")`` to engines with relay; call ``started(worker)``.

    Why: ``collective_rpc`` calls methods of workers, and a KV connector is not given its worker.
    Upstream: none; ``--worker-extension-cls`` is the user's. Remove when: both are possible.
    """

    @wrap(target("vllm.v1.worker.worker_base:WorkerBase"), "__init__")
    def init(stock: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        global _worker
        stock(self, vllm_config, *args, **kwargs)
        if is_asked_for(vllm_config):
            _worker = weakref.ref(self)
            self.relay_counters = metrics.counters
            started(self)


def worker() -> Any:
    """This process's vLLM worker. Raises RuntimeError where there is none."""
    if (found := _worker and _worker()) is None:
        raise RuntimeError("this process has no vLLM worker")
    return found


def extend_engine() -> None:
    """Add ``relay_system_kv`` to EngineCore; call ``before_shutdown(step)`` of our connectors.

    ``step()``: an engine step without requests. Why: front ends call no method of a connector,
    which hears of the end after its workers. Upstream: none. Remove when: both have changed.
    """
    core = target("vllm.v1.engine.core:EngineCore")

    def ours(self: Any) -> list[Any]:
        connector = self.scheduler.get_kv_connector()
        children = getattr(connector, "_connectors", [connector])  # MultiConnector's
        return [child for child in children if type(child).__name__ == CONNECTOR]

    core.relay_system_kv = lambda self: [x for child in ours(self) for x in child.status()]

    @wrap(core, "shutdown")
    def shutdown(stock: Any, self: Any) -> None:
        def step() -> None:
            empty = target("vllm.v1.core.sched.output:SchedulerOutput").make_empty()
            connector = self.scheduler.get_kv_connector()
            empty.kv_connector_metadata = connector.build_connector_meta(empty)
            done = self.model_executor.execute_model(empty)
            connector.update_connector_output(done.kv_connector_output)

        with suppress(Exception):  # the engine may be half made, or broken
            for connector in [] if self.scheduler.has_unfinished_requests() else ours(self):
                connector.before_shutdown(step)
        stock(self)


def wrap_engine_args(configure: Callable[[Any], None], admit: Callable[..., None]) -> None:
    """Let our settings complete vLLM's ``kv_transfer_config``, and have system-KV files checked.

    Why: every way to start an engine passes ``create_engine_config``; ``from_cli_args`` alone sees
    ``--chat-template``. Upstream: none. Remove when: plugins can complete the engine's arguments.
    """
    engine_args = target("vllm.engine.arg_utils:EngineArgs")

    @wrap(engine_args, "create_engine_config")
    def create(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_asked_for(self):
            return stock(self, *args, **kwargs)
        configure(self)
        config = stock(self, *args, **kwargs)
        # One of several API servers starts no engine; the process above them has checked.
        if self._api_process_rank < 0 or self._api_process_count == 1:
            admit(config, getattr(self, "_relay_chat_template", None))
        return config

    @wrap(engine_args, "from_cli_args")
    def from_cli(stock: Any, cls: Any, args: Any) -> Any:
        made = stock(cls, args)
        if configured(made) and getattr(args, "chat_template", None):
            made._relay_chat_template = args.chat_template  # no field: only where it is needed
        return made


def allow_resets(pool: Any, pinned: Callable[[], int], on_reset: Callable[[], None]) -> None:
    """Let one BlockPool reset its prefix cache while ``pinned()`` blocks are ours, and report it.

    Why: vLLM refuses it while a block is referenced, and calls ``reset_cache`` on some paths only.
    Upstream: vllm-project/vllm#12284 (the rule), #27046 (closed). Remove when: vLLM can pin blocks.
    """

    @wrap(pool, "reset_prefix_cache")
    def reset(stock: Any) -> bool:
        count = pinned()
        with swapped(pool, num_gpu_blocks=pool.num_gpu_blocks - count):
            done = bool(stock())
        if done and count:
            on_reset()
        return done


def before_eviction(pool: Any, act: Callable[[int], None]) -> None:
    """Call ``act(count)`` before one BlockPool takes ``count`` blocks from its free queue.

    Why: its order decides what is evicted. Upstream: none. Remove when: connectors may order it.
    """

    @wrap(pool, "get_new_blocks")
    def take(stock: Any, num_blocks: int) -> Any:
        act(num_blocks)
        return stock(num_blocks)


def tap_kv_updates(impl: Any, take: Callable[[Any, Any, Any], None]) -> None:
    """Call ``take(key, value, slots)`` after each KV update of one layer: rows, in no block layout.

    Why: ``save_kv_layer`` is given blocks. Upstream: none. Remove when: it is given rows.
    """

    @wrap(impl, "do_kv_cache_update")
    def put(stock: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> Any:
        done = stock(layer, key, value, kv_cache, slot_mapping)
        take(key, value, slot_mapping)
        return done


def block_hasher(vllm_config: Any, hash_block_size: int) -> Any:
    """vLLM's function that hashes a request's blocks. Branch: 0.33 on adds tokens of the next."""
    make = target("vllm.v1.core.kv_cache_utils:get_request_block_hasher")
    hash_of = target("vllm.utils.hashing:get_hash_fn_by_name")
    lookahead = "num_hash_lookahead_tokens"
    branch = lookahead in inspect.signature(make).parameters
    more = {lookahead: getattr(vllm_config, lookahead)} if branch else {}
    return make(hash_block_size, hash_of(vllm_config.cache_config.prefix_caching_hash_algo), **more)


def switch(owner: Any, name: str) -> bool:
    """A switch that not all versions have: ``calculate_kv_scales`` of the cache before 0.32 (the
    first request sets its scales), ``fa4_hd256`` of a layer from 0.32 on (heads of 256)."""
    return bool(getattr(owner, name, False))
