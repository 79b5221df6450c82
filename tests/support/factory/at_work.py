"""Another process that holds a workspace as the daemon does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from factory.core.workspace import Workspace
from tests.support.paths import ROOT

HOLDER = """
import sys
from pathlib import Path
from factory.core.workspace import MODEL_LOOP, Workspace
with Workspace.open(Path(sys.argv[1])).hold_lock(MODEL_LOOP):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def at_work(workspace: Workspace, program: str = "") -> Iterator[int]:
    """Yields its number; it ends with the block. ``program``: what its command line says that it is."""
    name = Path(sys.executable).with_name(program or "python")
    holder = subprocess.Popen(
        [str(name), "-c", HOLDER, str(workspace.root)], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()
