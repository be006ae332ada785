"""vLLM's own options, for the commands that start an engine."""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENGINE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
# Prefix of vLLM's options with one dash (-cc.mode=3, -tp), which the parser would read as -o.
ESCAPE = "\0"
# The last line of a traceback.
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b.*$", re.MULTILINE)


@contextmanager
def errors_of_the_engine(engine_args: Any) -> Iterator[None]:
    """Raises what vLLM's processes logged as the cause of a failed start, not "see above"."""
    names = ("VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")
    given = any(name in os.environ for name in names)  # the log is the caller's
    if given or engine_args.distributed_executor_backend not in (None, "mp", "uni"):
        yield  # processes of other machines do not see the files
        return
    # In memory: they go with this process, however it ends.
    config, log = (Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('log')}") for _ in range(2))
    stderr = {"class": "logging.StreamHandler", "level": "ERROR"}
    kept = {"class": "logging.FileHandler", "filename": str(log), "level": "ERROR"}
    logger = {"handlers": ["stderr", "kept"], "level": "ERROR", "propagate": False}
    content = {"handlers": {"stderr": stderr, "kept": kept}, "loggers": {"vllm": logger}}
    config.write_text(json.dumps({"version": 1, "disable_existing_loggers": False, **content}))
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(config)
    try:
        yield
    except RuntimeError as error:
        causes = _ERROR.findall(log.read_text())
        cause = causes[0] if causes else _without_pointer(str(error))
        raise RuntimeError(f"the engine failed: {cause}") from error
    finally:
        del os.environ["VLLM_LOGGING_CONFIG_PATH"]
        for file in (config, log):
            os.close(int(file.name))


def _without_pointer(message: str) -> str:
    """vLLM's error of a failed start, where nothing was logged that it could point at."""
    return message.replace("See root cause above.", "It logged no cause.")


def quiet_logs() -> None:
    """Leaves errors alone of the logs of vLLM and PyTorch, and those on stderr.

    Other lines would run into the progress bar, or stand before a command's own.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # "No CUDA runtime is found" where CUDA_HOME is set on a machine without a GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # "Triton is installed, but …", written before vLLM has set up its log
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)


def _parser(command: str) -> Any:
    """vLLM's parser of an engine's options."""
    quiet_logs()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return EngineArgs.add_cli_args(FlexibleArgumentParser(prog=f"vllm-relay {command}"))


def build_options(command: str, flags: list[str]) -> list[str]:
    """The options of ``vllm serve`` that ``vllm-relay build`` has, too: an engine's."""
    known = {*_parser(command)._option_string_actions, "--chat-template"}
    kept, keep = [], True
    for flag in flags:
        if re.match(r"--?[a-zA-Z]", flag):  # what follows, up to the next option, is its value
            name = re.split(r"[=.+]", flag)[0]
            keep = (name.replace("_", "-") if name.startswith("--") else name) in known
        if keep:
            kept.append(flag)
    return kept


def read_engine_args(command: str, model: str, extra: list[str]) -> Any:
    """vLLM's EngineArgs from the options that are not ours."""
    from vllm.engine.arg_utils import EngineArgs

    parser = _parser(command)
    extra = [x.removeprefix(ESCAPE) for x in extra if x != "--"]
    given = parser.parse_args(["--model", model, *extra])
    return EngineArgs.from_cli_args(given)
