"""The ``factory`` command: the app, and what becomes of an error. What its commands share is in ``core.options``."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from factory.cli.core.options import DEFAULT, AsJson, Say, Where, command, open_plant, person, print_json
from factory.core import devices, stopping
from factory.core.errors import FactoryError
from factory.core.faults import fault_of
from kernels.contract.message import plain, titled

__all__ = ["DEFAULT", "AsJson", "Say", "Where", "app", "command", "main", "open_plant", "person", "print_json"]

# OpenMP threads that wait for one another spin, by default for milliseconds: next to two busy programs on two cores a step took 4.8 s
# in place of 0.17, with fewer turns 0.4. Alone that costs about 4 % (docs/LOG.md). Read when torch is loaded, by children too.
SPINS = {"GOMP_SPINCOUNT": "1000"}
HELP = """A factory for language models: data shards come in, gated model releases come out, and its own code is
measured and improved.

Start with 'factory demo' (everything once, on this machine), or 'factory init' and drop shards into the inbox."""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from factory.git.version import version

        print(version())
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and the code's commit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point: a ``FactoryError`` is one clear message, a full disk too; anything else is a bug and keeps its traceback."""
    end_if_stopped = stopping.handle_signals()
    for name, value in (SPINS | devices.COMPILER).items():
        os.environ.setdefault(name, value)
    # No process that is started here looks for modules in the folder it happens to run in.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        app()
    except BaseException as error:
        end_if_stopped()  # whatever became of the signal's exception on its way: an import that it cut short fails otherwise
        code = exit_code(error)
        if code is None:
            raise
        sys.exit(code)


def exit_code(error: BaseException) -> int | None:
    """Of an error that a user can correct, whose message is printed; None for any other."""
    if isinstance(error, FactoryError):
        as_json = "--json" in sys.argv[1:]
        print(json.dumps({"error": plain(error.message)}) if as_json else f"factory: {titled(error)}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return 141
    if isinstance(error, Exception) and (fault := fault_of(error)):
        print(
            f"factory: {fault.says}; nothing recorded was lost: {fault.do} and run the same command again",
            file=sys.stderr,
        )
        return fault.exit_code
    return None
