"""The command line as a person meets it: a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from factory.cli.app import app
from factory.core.workspace import Workspace
from tests.support.paths import ROOT


def factory(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "FACTORY_HOME"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "factory", *words],
        capture_output=True,
        text=True,
        cwd=cwd or ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def command_here(*words: str, home: Workspace) -> Result:
    """The same in this process: starting Python takes seconds on a busy machine. An error of the user's is its ``exception``."""
    return CliRunner().invoke(app, [*words, "-w", str(home.root)])
