"""What a command does where a daemon holds the workspace: it asks that one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from factory.cli.core.options import person
from factory.core.errors import WorkspaceError
from factory.core.workspace import MODEL_LOOP
from factory.ledger.plant import Plant


def hold_or_ask(held: ExitStack, plant: Plant, errands: Sequence[str], **how: Any) -> str:
    """Hold the daemon's lock in ``held``; where a daemon has it, ask for the errands ('judge 3'). Returns what a person is told then; '': it
    is held.

    ``how``: what the errands are done with, as ``factory.retrying.asking.asked`` gives it.
    """
    from factory.retrying.asking import ask
    from factory.status.running import daemon

    try:
        held.enter_context(plant.workspace.lock(MODEL_LOOP))
    except WorkspaceError as busy:
        command = daemon(plant.workspace).get("command", "").split()
        if command[:1] == ["factory"] and command[1:2] not in (["run"], ["demo"]):
            raise  # 'factory train', say, which does not look for what is asked
        ask(plant.ledger, errands, person(), **how)
        return f"{', '.join(errands)}: 'factory run' does it in its next pass ({str(busy).partition(';')[0]})"
    return ""
