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
    from factory.ledger.ledger import Ledger

Where = Annotated[Path, typer.Option("--workspace", "-w", envvar="FACTORY_HOME", help="The factory's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
DEFAULT = Path("workspace")


def open_workspace(where: Path) -> tuple[Workspace, Ledger, Terminal]:
    from factory.core.console import Terminal
    from factory.ledger.ledger import Ledger

    workspace = Workspace.open(where)
    return workspace, Ledger.open(workspace.ledger_url, workspace.root), Terminal()


def person() -> str:
    """The person who decides on the command line, on one line."""
    names = (" ".join(os.environ.get(key, "").split()) for key in ("USER", "LOGNAME"))
    return next((name for name in names if name and name.isprintable()), f"uid {os.getuid()}")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))
