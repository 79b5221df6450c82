"""Defines the typer app of the ``factory`` command, and turns an error into one line and an exit code. ``core.options`` has the shared options."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from factory.cli.core.options import (
    DEFAULT,
    AnswerPrinter,
    JsonOption,
    WorkspaceOption,
    get_current_user,
    open_plant,
    print_json,
    register_command,
)
from factory.core import devices, stop_signals
from factory.core.errors import FactoryError
from factory.core.faults import find_fault_in
from kernels.contract.message import Message, format_error_with_code, messages_to_json

__all__ = [
    "DEFAULT",
    "JsonOption",
    "AnswerPrinter",
    "WorkspaceOption",
    "app",
    "register_command",
    "main",
    "open_plant",
    "get_current_user",
    "print_json",
]

# OpenMP threads that wait for one another spin, by default for milliseconds. Next to two busy programs on two cores a step took 4.8 s
# instead of 0.17 s; with fewer spins it took 0.4 s. On an idle machine fewer spins cost about 4 % (docs/LOG.md). Child processes inherit this.
SPINS = {"GOMP_SPINCOUNT": "1000"}

app = typer.Typer(
    help="""A factory for language models. You put data shards in. It trains, evaluates and releases models that pass its gates.
It also measures and improves its own training code.

Start with 'factory demo', which runs everything once on this machine. Or run 'factory init' and put shards into the inbox.""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from factory.git.version import describe_version

        print(describe_version())
        raise typer.Exit


@app.callback()
def read_global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and the commit of the code."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. A ``FactoryError`` or a machine fault becomes one message; any other exception is a bug and keeps its traceback."""
    end_if_stopped = stop_signals.install_stop_signal_handlers()
    for name, value in (SPINS | devices.COMPILER_SETTINGS).items():
        os.environ.setdefault(name, value)
    # Child processes must not import modules from the folder that they run in.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        app()
    except BaseException as error:
        end_if_stopped()  # first, because a signal may have become another exception, such as an ImportError
        code = print_error_and_get_exit_code(error)
        if code is None:
            raise
        sys.exit(code)


def print_error_and_get_exit_code(error: BaseException) -> int | None:
    """Print the message of an error that a user can correct, and return its exit code. Returns None for any other error, and prints nothing."""
    if isinstance(error, FactoryError):
        as_json = "--json" in sys.argv[1:]
        print(
            json.dumps({"error": messages_to_json(error.message)})
            if as_json
            else f"factory: {format_error_with_code(error)}",
            file=sys.stderr,
        )
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return 141
    if isinstance(error, Exception) and (fault := find_fault_in(error)):
        said = Message(
            "cli.machine_fault",
            "{fault}. Everything that was recorded is kept. To continue, {remedy} and run the same command again",
            fault=fault.description,
            remedy=fault.remedy,
        )
        print(f"factory: error[{said.code}]: {said}", file=sys.stderr)
        return fault.exit_code
    return None
