"""vllm-relay: decode attention over shared prefixes, computed once per batch.

Importing this package loads neither torch nor vLLM; `register` is the entry point that vLLM calls
in every process.
"""

__version__ = "0.1.0"


def register() -> None:
    """Make the attention backend ``relay`` known to vLLM (entry point ``vllm.general_plugins``).

    May be called any number of times in any process.

    Raises:
        RuntimeError: the installed vLLM is outside the supported range.
    """
    from vllm_relay import plugin

    plugin.register()


def register_name() -> None:
    """Make the name ``relay`` known before any config object is made.

    Entry point ``vllm.platform_plugins``, which vLLM calls while it is imported. Returning None
    says that this is no platform; a failure is left for `register` to report.
    """
    from vllm_relay import plugin

    plugin.check_engine_version()
    plugin.backend_member()
