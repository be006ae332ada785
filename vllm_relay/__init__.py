"""vllm-relay: attention over shared prefixes, computed once per batch.

Importing this package loads neither torch nor vLLM.
"""

from collections.abc import Sequence
from typing import Any

__version__ = "0.1.0"


def order(prompts: Sequence[Any]) -> list[int]:
    """Indices of prompts, common prefixes together; see `vllm_relay.sharing.order.order`."""
    from vllm_relay.sharing import order

    return order.order(prompts)


def register() -> None:
    """Register with vLLM, any number of times (entry point ``vllm.general_plugins``).

    Raises nothing: where relay is unavailable one line says why, and vLLM serves as without it.
    """
    from vllm_relay import plugin

    plugin.register()


def register_name() -> None:
    """Register the name ``relay`` before any config object is made.

    vLLM calls the entry point ``vllm.platform_plugins`` while it is imported. None means that this
    is no platform; a failure is left for `register` to report. A process of one of our commands
    ends with the command from here on.
    """
    from vllm_relay import compat, lifetime

    lifetime.follow()
    if compat.unsupported() is None:
        compat.backend_member()
