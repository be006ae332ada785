"""Registration with vLLM: the backend and our KV connector.

`vllm_relay.compat` holds the patches that this applies. None of them does anything in an engine
that asks for neither the backend nor a system KV.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vllm_relay import compat, metrics
from vllm_relay.config import CONNECTOR, CONNECTOR_MODULE
from vllm_relay.patching import undo

# Environment variable that children inherit: the reason that was logged already. Without vLLM's
# prefix, whose unknown variables it warns of.
REPORTED = "RELAY_UNAVAILABLE"


def register() -> None:
    """`install`; one line says why not. Idempotent."""
    reason = install()
    if reason is not None and os.environ.get(REPORTED) != reason:
        os.environ[REPORTED] = reason
        metrics.say_once(f"unavailable: {reason}")


def install() -> str | None:
    """Add ``RELAY`` to vLLM's attention backends, with what it needs, or return why not.

    Outside `compat.SUPPORTED`, or where vLLM lacks what a patch changes, the name is withdrawn, so
    that asking for it is an error, and vLLM serves as without this plugin.
    """
    try:
        if (reason := compat.unsupported()) is None:
            _install()
    except Exception as error:
        undo()
        reason = " ".join(str(error).split()) or type(error).__name__
    if reason is not None:
        with suppress(Exception):
            compat.withdraw_backend()
    return reason


def _install() -> None:
    compat.backend_member()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        compat.honour_backend_on_cpu()
        compat.keep_all_cores()
    elif current_platform.is_cuda():
        compat.fall_back_on_cuda()
    compat.extend_worker(_answer)
    compat.wrap_engine_args(_configure, _admit)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)


# Imported when an engine is configured: they load torch.
def _configure(engine_args: Any) -> None:
    from vllm_relay.system_kv import admission

    admission.configure(engine_args)
    with _unmeasured():
        from vllm_relay.monitoring.prometheus import publish

        names = engine_args.served_model_name or engine_args.model
        publish(names if isinstance(names, str) else names[0])


def _admit(vllm_config: Any, chat_template: str | None) -> None:
    from vllm_relay.monitoring.channel import open_channel
    from vllm_relay.system_kv import admission

    admission.admit(vllm_config, chat_template)
    open_channel()


def _answer(worker: Any) -> None:
    """Let a worker that was just made answer those who serve its engine's metrics."""
    with _unmeasured():
        from vllm_relay.monitoring.channel import answer

        engine = worker.vllm_config.parallel_config.data_parallel_index
        answer(
            f"{engine}-{worker.rank}-{os.getpid()}",
            lambda: {
                "engine": engine,
                "counters": metrics.counters(wait=False),
                "groups": metrics.groups(),
                "packed_bytes": metrics.packed_bytes(),
            },
        )


@contextmanager
def _unmeasured() -> Iterator[None]:
    """Context whose errors cost relay's metrics alone, and one line."""
    try:
        yield
    except Exception as error:
        metrics.say_once(f"its counters are not in /metrics: {type(error).__name__}: {error}")
