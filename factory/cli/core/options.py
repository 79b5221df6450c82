"""The option for the workspace, and the printing of an answer as text for people or as JSON for programs. All commands share them.

>>> @register_command(typer.Typer(), "count")
... def count_segments(plant: Plant, say: AnswerPrinter, kind: Annotated[str, typer.Option(help="Of this kind.")] = "trunk") -> None:
...     found = plant.ledger.read("SELECT id FROM segments WHERE kind = :kind", kind=kind)
...     say(found, (f"segment {row['id']}" for row in found), nothing="  none")

This defines the command ``count --kind anneal --workspace FOLDER --json``.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from kernels.contract.message import messages_to_json

if TYPE_CHECKING:
    from factory.core.console import Terminal

WorkspaceOption = Annotated[
    Path, typer.Option("--workspace", "-w", envvar="FACTORY_HOME", help="The workspace, the factory's folder.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
DEFAULT = Path("workspace")


@dataclass(frozen=True)
class AnswerPrinter:
    """Prints a command's answer, as text or as JSON."""

    terminal: Terminal
    as_json: bool

    def __call__(self, found: Any, lines: str | Iterable[str] = (), nothing: str = "") -> None:
        """With --json, print ``found`` as JSON. Otherwise print the lines, or ``nothing`` if there are no lines."""
        if self.as_json:
            print_json(found)
            return
        shown = [lines] if isinstance(lines, str) else list(lines)
        for line in shown or [nothing] * bool(nothing):
            self.terminal.line(line)

    def confirm(self, yes: bool, action: str) -> None:
        """Ask the person to agree, unless ``yes``. Raises: InputError if there is no terminal to ask at; typer.Abort if the person declines."""
        if not yes:
            if self.as_json or not sys.stdin.isatty():
                raise InputError(
                    "options.not_confirmed",
                    "Nothing was changed. To {action}, add '--yes'. To see what would change, add '--dry-run'.",
                    action=action,
                )
            typer.confirm(f"  {action}?", abort=True)

    def print_line(self, text: str) -> None:
        """Print a line for people; with --json, print nothing."""
        if not self.as_json:
            self.terminal.line(text)


def register_command(
    group: typer.Typer, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command. Its first two parameters, a ``Plant`` and an ``AnswerPrinter``, are made from --workspace and --json."""

    def register(call: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(call, include_extras=True)
        _, _, *own = inspect.signature(call).parameters.values()
        keys = {one.name: (hints[one.name], one.default) for one in own}
        keys |= {"where": (WorkspaceOption, DEFAULT), "as_json": (JsonOption, False)}

        @functools.wraps(call)
        def run(*, where: Path, as_json: bool, **given: Any) -> None:
            plant, terminal = open_plant(where, as_json)
            call(plant, AnswerPrinter(terminal, as_json), **given)

        kind = inspect.Parameter.KEYWORD_ONLY
        made = [inspect.Parameter(key, kind, default=value, annotation=hint) for key, (hint, value) in keys.items()]
        run.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        run.__annotations__ = {key: hint for key, (hint, _) in keys.items()}
        group.command(name)(run)
        return call

    return register


def open_plant(where: Path, silent: bool = False) -> tuple[Plant, Terminal]:
    """Open the plant of a workspace; returns (plant, terminal). Long work reports its progress on the terminal, unless ``silent``."""
    from factory.core.console import Terminal
    from factory.core.progress import SILENT
    from factory.ledger.ledger import Ledger

    workspace, terminal = Workspace.open(where), Terminal()
    return Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root), SILENT if silent else terminal), terminal


def get_current_user() -> str:
    """Return the name of the user who runs the command, without line breaks."""
    names = (" ".join(os.environ.get(key, "").split()) for key in ("USER", "LOGNAME"))
    return next((name for name in names if name and name.isprintable()), f"uid {os.getuid()}")


def print_json(value: Any) -> None:
    """Print JSON for programs. A message becomes {"code", "text", "data"}."""
    print(json.dumps(messages_to_json(value), indent=2, ensure_ascii=False))
