"""The command ``vllm-relay``.

Importing this loads neither torch nor vLLM; commands import them where they need them.
"""

import re
import sys
from typing import Annotated

import typer

import vllm_relay.cli.explain as explain
from vllm_relay import __version__
from vllm_relay.cli import pins, system_kv
from vllm_relay.cli.bench import bench
from vllm_relay.cli.calibrate import calibrate
from vllm_relay.cli.console import out
from vllm_relay.cli.doctor import doctor
from vllm_relay.cli.engine import ENGINE_OPTIONS, ESCAPE
from vllm_relay.cli.top import top

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="KV that many requests share, for vLLM: compute a prompt's KV once and serve with it from "
    "the start; see what requests share and what that is worth.",
)
app.command(context_settings=ENGINE_OPTIONS)(system_kv.build)
app.command()(system_kv.inspect)
app.command(context_settings=ENGINE_OPTIONS)(system_kv.verify)
app.command()(explain.explain)
app.command(context_settings=ENGINE_OPTIONS)(calibrate)
app.command(context_settings=ENGINE_OPTIONS)(doctor)
app.command(context_settings=ENGINE_OPTIONS)(bench)
app.command()(top)
app.command()(pins.pin)
app.command()(pins.unpin)
app.command("list")(pins.list_pins)
app.command()(pins.save)


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"vllm-relay {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it, exit."),
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Entry point ``vllm-relay``."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["bench"], ["build"], ["calibrate"], ["doctor"], ["verify"]):
        theirs = re.compile(r"-[a-z]")
        arguments = [
            ESCAPE + x if theirs.match(x) and not x.startswith("-o") else x for x in arguments
        ]
    app(args=arguments)
