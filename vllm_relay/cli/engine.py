"""vLLM's own options, which commands that start an engine take beside theirs."""

import os
from typing import Any

ENGINE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
# Put before vLLM's options with one dash (-cc.mode=3, -tp): the parser would read them as -o.
ESCAPE = "\0"


def _parser(command: str) -> Any:
    """vLLM's, of the options of an engine."""
    # Its log would run into the progress bar, or into JSON; errors stay.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return EngineArgs.add_cli_args(FlexibleArgumentParser(prog=f"vllm-relay {command}"))


def without_server_options(command: str, flags: list[str]) -> list[str]:
    """Of the options of ``vllm serve`` those that an engine has, too."""
    _, unknown = _parser(command).parse_known_args(flags)
    kept = []
    for flag in flags:
        # the parser has written options its own way: in both, no one means two things
        if unknown and flag.replace("_", "-") == unknown[0].replace("_", "-"):
            unknown.pop(0)
        else:
            kept.append(flag)
    return kept


def read_engine_args(command: str, model: str, extra: list[str]) -> Any:
    """vLLM's EngineArgs from the options that are not ours."""
    from vllm.engine.arg_utils import EngineArgs

    parser = _parser(command)
    extra = [x.removeprefix(ESCAPE) for x in extra if x != "--"]
    given = parser.parse_args(["--model", model, *extra])
    return EngineArgs.from_cli_args(given)
