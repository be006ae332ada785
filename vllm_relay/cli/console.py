"""What the commands share: where they print, and how they end on an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

# What files and users say is shown as it is: no markup, no emoji codes.
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
out = Console(**PLAIN, soft_wrap=True)
err = Console(**PLAIN, soft_wrap=True, stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with status 1 and one line on stderr, for errors that users can mend."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        err.print(f"vllm-relay: {_one_line(error)}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        err.print("vllm-relay: stopped")
        raise typer.Exit(130) from None


def _one_line(error: Exception) -> str:
    """What an error says, without pydantic's frame around it."""
    if hasattr(error, "errors"):
        return "; ".join(str(entry["msg"]) for entry in error.errors())
    return " ".join(str(error).split())
