"""Options that many commands have, the workspace that they open, and JSON for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factory.core.workspace import Workspace

if TYPE_CHECKING:
    from factory.core.console import Terminal
    from factory.ledger.plant import Plant

Where = Annotated[Path, typer.Option("--workspace", "-w", envvar="FACTORY_HOME", help="The factory's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
DEFAULT = Path("workspace")


def open_plant(where: Path, quiet: bool = False) -> tuple[Plant, Terminal]:
    """A factory, and the terminal: long work reports there, unless ``quiet``, as for ``--json``."""
    from factory.core.console import Terminal
    from factory.core.progress import SILENT
    from factory.ledger.ledger import Ledger
    from factory.ledger.plant import Plant

    workspace, terminal = Workspace.open(where), Terminal()
    return Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root), SILENT if quiet else terminal), terminal


def person() -> str:
    """The person who decides on the command line, on one line."""
    names = (" ".join(os.environ.get(key, "").split()) for key in ("USER", "LOGNAME"))
    return next((name for name in names if name and name.isprintable()), f"uid {os.getuid()}")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))
