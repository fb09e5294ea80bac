"""The commands together, and what an error looks like: one red line, exit code 1 (2 where usage is wrong)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from fp8bridge import __version__
from fp8bridge.errors import BridgeError

from . import bench
from .config import config
from .convert import convert
from .demo import demo
from .doctor import doctor
from .keys import keys
from .plan import plan
from .serve import serve
from .verify import verify

TRACEBACK = "--traceback"

app = typer.Typer(
    name="fp8bridge",
    help="Moves a trainer's weights into running inference servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, plan, convert, doctor, verify, serve, keys):
    app.command()(command)
app.add_typer(config, name="config")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fp8bridge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option(TRACEBACK, help="Show where an error came from, not only what.")] = False,
) -> None:
    """Both are done with here: `version` by its callback, `traceback` by `main`, wherever it stands."""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line (default: this process's) and exit."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        app([word for word in words if word != TRACEBACK], prog_name="fp8bridge")
    except Exception as error:  # the edge of the program: nothing above could handle it
        if TRACEBACK in words:
            raise
        _print_error(_describe(error))
        sys.exit(1)


def _describe(error: Exception) -> str:
    if isinstance(error, BridgeError):
        return f"error: {error}"
    if isinstance(error, ModuleNotFoundError):
        return f"error: {error}; `fp8bridge doctor` says what to install"
    return f"error: {type(error).__name__}: {error} (a bug; {TRACEBACK} shows where)"


def _print_error(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
