"""Terminal output and command-line options that suites share."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def make_console() -> Console:
    """Console wide enough for the tables: without a terminal rich assumes 80 columns."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


@contextmanager
def step(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Spinner with elapsed seconds; yields the function that reports progress.

    Ends with one line that stays. Without a terminal: plain lines, at most one every 5 s.
    """
    started = printed = time.monotonic()
    live = console.is_terminal
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not live) as progress:
        task = progress.add_task(title)

        def report(doing: str) -> None:
            nonlocal printed
            progress.update(task, description=f"{title}: {doing}")
            if not live and time.monotonic() - printed >= 5:
                printed = time.monotonic()
                console.print(f"  {title}: {doing}", highlight=False)

        yield report
    seconds = time.monotonic() - started
    console.print(f"  [green]done[/] {title} [dim]({seconds:.0f} s)[/]", highlight=False)


def at_least(least: int) -> Callable[[str], int]:
    """Argument type of argparse: an integer with a lower bound."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return integer


def add_save(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", action="store_true", help="write a CSV to benchmarks/results")


def add_eager(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--eager", action="store_true", help="engines without torch.compile, which start sooner"
    )


def add_heads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--heads",
        type=int,
        nargs=3,
        default=[16, 16, 128],
        metavar=("QUERY", "KV", "SIZE"),
        help="query heads, KV heads and head size of the model",
    )
