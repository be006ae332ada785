"""Output of the commands: consoles, progress, and how they end on an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# Text of files and users is printed as it is: no markup, no emoji codes.
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
out = Console(**PLAIN, soft_wrap=True)
err = Console(**PLAIN, soft_wrap=True, stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the command with status 1 and one line on stderr on an error that users can mend."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        err.print(f"vllm-relay: {_one_line(error)}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        err.print("vllm-relay: stopped")
        raise typer.Exit(130) from None


@contextmanager
def progress(unit: str = "tokens", lines: bool = True) -> Iterator[Any]:
    """A function ``report(phase, done, total)``: a bar in a terminal, else lines or nothing."""
    counts = TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), counts)
    live, said = err.is_terminal, set[str]()
    with Progress(
        *columns, TimeElapsedColumn(), console=err, transient=True, disable=not live
    ) as bar:
        task = bar.add_task("starting", total=1)

        def report(doing: str, done: int, total: int) -> None:
            bar.update(task, description=doing, completed=done, total=total)
            if lines and not live and doing not in said:
                said.add(doing)
                err.print(f"vllm-relay: {doing}")

        yield report


def _one_line(error: Exception) -> str:
    """An error's message, without pydantic's frame or an errno."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if hasattr(error, "errors"):
        return "; ".join(str(entry["msg"]) for entry in error.errors())
    return " ".join(str(error).split())
