"""vLLM's own options, which commands that start an engine take beside theirs."""

import os
from typing import Any

ENGINE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
# Put before vLLM's options with one dash (-cc.mode=3, -tp): the parser would read them as -o.
ESCAPE = "\0"


def read_engine_args(command: str, model: str, extra: list[str]) -> Any:
    """vLLM's EngineArgs from the options that are not ours."""
    # Its log would run into the progress bar, or into JSON; errors stay.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=f"vllm-relay {command}"))
    extra = [x.removeprefix(ESCAPE) for x in extra if x != "--"]
    given = parser.parse_args(["--model", model, *extra])
    return EngineArgs.from_cli_args(given)
