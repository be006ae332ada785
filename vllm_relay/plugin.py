"""Registration with vLLM: the backend and our KV connector.

`vllm_relay.compat` holds the patches that this applies.
"""

from contextlib import suppress
from typing import Any

from vllm_relay import compat
from vllm_relay.config import CONNECTOR, CONNECTOR_MODULE


def register() -> None:
    """Add ``RELAY`` to vLLM's attention backends, with what it needs. Idempotent.

    Raises:
        RuntimeError: vLLM is outside `compat.SUPPORTED`, or lacks what a patch changes.
    """
    compat.check_engine_version()
    compat.backend_member()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        compat.honour_backend_on_cpu()
        compat.keep_all_cores()
    elif current_platform.is_cuda():
        compat.fall_back_on_cuda()
    compat.extend_worker()
    compat.wrap_engine_args(_configure, _admit)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)


# Imported when an engine is configured: they load torch.
def _configure(engine_args: Any) -> None:
    from vllm_relay.system_kv import admission

    admission.configure(engine_args)


def _admit(vllm_config: Any, chat_template: str | None) -> None:
    from vllm_relay.system_kv import admission

    admission.admit(vllm_config, chat_template)
